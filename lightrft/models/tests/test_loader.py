import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import (AutoConfig, AutoModelForSequenceClassification, BertConfig, GptOssConfig, logging as
                          hf_logging, MambaConfig, MllamaConfig, T5Config, ViTConfig)

from lightrft.config.rm_schema import RewardModelConfig
from lightrft.config.schema import ModelConfig
from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.models import loader
from lightrft.models.config_json import check_context, read_config
from lightrft.models.loader import load_actor, load_critic, load_reward_model
from lightrft.models.reward_model import RewardHead
from lightrft.models.tokenizer import load_tokenizer
from lightrft.ops import logprobs
from lightrft.strategy.distributed import transformer_blocks
from lightrft.tests.support import naive_model, tiny
from lightrft.utils.errors import UserError


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("base"), "qwen2", attention_dropout=0.5)


@pytest.fixture
def broken(path, tmp_path):
    return shutil.copytree(path, tmp_path / "copy")


def test_a_config_is_parsed_anew_only_when_its_file_changes(path, broken):
    """Nobody changes the config that another reads, nor what its file says later."""
    read_config(str(path)).vocab_size = 7
    assert read_config(str(path)).vocab_size == tiny.config().vocab_size
    values = json.loads((broken / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    before = read_config(str(broken))
    (broken / "config.json").write_text(json.dumps(values))
    assert (before.rms_norm_eps, read_config(str(broken)).rms_norm_eps) == (tiny.config().rms_norm_eps, 0.5)
    assert read_config(str(broken)).name_or_path == str(broken)


# -- actor ------------------------------------------------------------------------------------------------------------
def test_the_actor_is_float32_packed_and_free_of_dropout(path):
    actor, exp = load_actor(ModelConfig(pretrain=str(path))), naive_model.experience()
    assert actor.training and actor.chunk_mib == 256 and actor.config.attention_dropout == 0
    assert {p.dtype for p in actor.parameters()} == {torch.float32} and all(p.requires_grad for p in actor.parameters())
    assert torch.equal(actor(exp)[0], actor(exp)[0])
    twin = tiny.model()
    torch.testing.assert_close(actor(exp)[0], naive_model.logprobs(twin, exp)[0], atol=1e-5, rtol=0)


def test_a_reference_is_frozen_and_has_no_adapters(path):
    cfg = ModelConfig(pretrain=None, lora_rank=4, gradient_checkpointing=True, logprob_chunk_mib=7)
    reference = load_actor(cfg, str(path), train=False, dtype=torch.bfloat16)
    assert not any(p.requires_grad for p in reference.parameters()) and not reference.model.training
    assert reference.chunk_mib == 7 and {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert not any("lora_" in name for name, _ in reference.named_parameters())
    assert reference(naive_model.experience())[0].dtype == torch.float32


def test_the_chunk_of_logits_follows_the_memory_of_the_gpu(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gib, options, expected in ((80, {}, 1280), (24, {}, 384), (8, {}, 256), (80, {"logprob_chunk_mib": 7}, 7)):
        monkeypatch.setattr(loader, "total_memory", lambda device, gib=gib: gib << 30)
        assert load_actor(ModelConfig(pretrain=str(path), **options)).chunk_mib == expected


def test_freezing(path):
    actor = load_actor(ModelConfig(pretrain=str(path), freeze_prefix=["model.embed_tokens", "model.layers.0"]))
    frozen = {name for name, p in actor.named_parameters() if not p.requires_grad}
    assert frozen and all(name.startswith(("model.model.embed_tokens", "model.model.layers.0")) for name in frozen)
    actor(naive_model.experience())[0].sum().backward()
    assert all((p.grad is None) == (name in frozen) for name, p in actor.named_parameters())
    with pytest.raises(ValueError, match="matches no parameter.*model.layers"):
        load_actor(ModelConfig(pretrain=str(path), freeze_prefix=["visual."]))
    with pytest.raises(ValueError, match="nothing to train"):
        load_actor(ModelConfig(pretrain=str(path), freeze_prefix=["model", "lm_head"][:1]))


def test_gradient_checkpointing_is_switched_on(path):
    assert load_actor(ModelConfig(pretrain=str(path), gradient_checkpointing=True)).hf_model.is_gradient_checkpointing
    assert not load_actor(ModelConfig(pretrain=str(path))).hf_model.is_gradient_checkpointing


def test_the_option_selects_the_kernels_of_log_probs(path, monkeypatch):
    """One pass reads the logits of a chunk, and one writes their gradient; here plain formulas take their place."""
    calls, exp = [], naive_model.experience()

    def read(logits, targets, temperature, found, norms, entropies):
        calls.append("read")
        log_p = (logits / temperature).log_softmax(-1)
        found.copy_(log_p.gather(-1, targets[:, None])[:, 0])
        norms.copy_((logits / temperature).logsumexp(-1))

    def slope(logits, out, targets, temperature, norms, entropies, grads, _):
        calls.append("slope")
        p = (logits / temperature - norms[:, None]).exp()
        return out.copy_((F.one_hot(targets, logits.shape[1]) - p) * grads[:, None] / temperature)

    monkeypatch.setattr(logprobs, "_kernels", lambda: SimpleNamespace(read=read, slope=slope))
    results = []
    for options in ({}, {"fused_logprobs": True}):
        actor = load_actor(ModelConfig(pretrain=str(path), **options))
        out = actor(exp, temperature=0.7)[0]
        out.sum().backward()
        results.append([out, *(p.grad for p in actor.parameters())])
    assert calls == ["read", "slope"] and not load_actor(PolicyModelConfig(pretrain=str(path))).fused_logprobs
    for fused, usual in zip(*results, strict=True):
        assert (fused - usual).abs().max() <= 1e-5 * usual.abs().max().clamp(min=1)


@pytest.mark.parametrize("options, restores", [({}, False), ({"lora_rank": 4}, False),
                                               ({"lora_rank": 4, "lora_dropout": 0.1}, True)], ids=str)  # yapf: disable
def test_random_numbers_are_restored_where_some_are_drawn(path, options, restores):
    for mode in (True, "selective"):
        hf = load_actor(ModelConfig(pretrain=str(path), gradient_checkpointing=mode, **options)).hf_model
        checkpoint = transformer_blocks(hf)[0]._gradient_checkpointing_func.keywords
        assert checkpoint["preserve_rng_state"] is restores and ("context_fn" in checkpoint) is (mode == "selective")


def test_exports_keep_nothing_of_packed_attention(path, tmp_path):
    load_actor(ModelConfig(pretrain=str(path))).hf_model.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("where, message", [
    (None, "--pretrain"),
    ("/no/such/folder", "'/no/such/folder' does not exist"),
    ("./relative", "does not exist"),
])
def test_paths_that_lead_nowhere(where, message):
    with pytest.raises(ValueError, match=message):
        load_actor(ModelConfig(pretrain=where))


def test_a_hub_id_without_a_hub(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (lambda: load_actor(ModelConfig(pretrain="some/model")), lambda: load_tokenizer("some/model")):
        with pytest.raises(ValueError, match="some/model") as caught:
            load()
        assert "\n" not in str(caught.value)


def test_a_file_and_a_folder_without_config(path, tmp_path):
    with pytest.raises(ValueError, match="is a file"):
        load_actor(ModelConfig(pretrain=str(path / "config.json")))
    with pytest.raises(ValueError, match="no config.json"):
        load_actor(ModelConfig(pretrain=str(tmp_path)))


def _truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize("damage, message", [
    (lambda folder: (folder / "config.json").write_text("{"), "cannot load a model .* is no JSON"),
    (lambda folder: (folder / "config.json").write_text("null"), "cannot load a model .* holds no JSON object"),
    (lambda folder:
     (folder / "config.json").write_bytes(b'{"a": "\xe9"}'), "cannot load a model .* is no JSON: .*utf-8"),
    (lambda folder: tiny.change_json(folder / "config.json", hidden_size="wide"), "cannot load a model .*hidden_size"),
    (lambda folder: tiny.change_json(folder / "config.json", model_type="no_such_type"),
     "cannot load a model.*no_such_type"),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json, .* lightrft export writes one from a"),
    (lambda folder: shutil.copytree(folder, folder / "hf") and
     (folder / "config.json").unlink(), "has no config.json, .* Give .*/copy/hf, the model of this run"),
    (lambda folder: (folder / "model.safetensors").unlink(), "cannot load the weights"),
    (_truncate, "cannot load the weights"),
    (lambda folder: tiny.change_json(folder / "config.json", num_hidden_layers=3, layer_types=None),
     "lacks 12 tensors.*layers.2"),
    (lambda folder: tiny.change_json(folder / "config.json", intermediate_size=48),
     "cannot load the weights of .*: model.layers.0.mlp.down_proj.weight is stored as 32 x 64, and Qwen2.* 32 x 48 here"
     ),
])
def test_damaged_folders(broken, damage, message):
    damage(broken)
    with pytest.raises(ValueError, match=message):
        load_actor(ModelConfig(pretrain=str(broken)))


@pytest.mark.parametrize("config, message", [
    (BertConfig(architectures=["BertForMaskedLM"]), "'bert'.*encoder"),
    (BertConfig(architectures=["BertLMHeadModel"]), "'bert' has other log-probs for a sequence in a pack"),
    (T5Config(), "'t5'.*encoder-decoder"),
    (ViTConfig(), "'vit'.*not a causal language model"),
    (MllamaConfig(), "'mllama'.*vision or audio tower"),
    (MambaConfig(num_hidden_layers=1, hidden_size=8, vocab_size=16), "wrong architecture"),
    (GptOssConfig(num_hidden_layers=1), "'gpt_oss'.*attention sinks"),
    (AutoConfig.for_model("deepseek_v32"), "'deepseek_v32'.*layers, which would mix"),
    (tiny.config("gemma3", use_bidirectional_attention=True), "'gemma3_text'.*not a causal"),
], ids=lambda value: getattr(value, "model_type", ""))
def test_wrong_architectures(tmp_path, config, message):
    config.save_pretrained(tmp_path)
    if config.model_type == "mamba":
        from transformers import MambaForCausalLM
        MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError,
                       match=f"{tmp_path}.*wrong architecture.*{message}" if "wrong" not in message else message):
        load_actor(ModelConfig(pretrain=str(tmp_path)))


# -- critic -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma3"])
def test_a_new_critic_values_everything_at_zero_and_learns(family, tmp_path):
    critic, exp = load_critic(ModelConfig(pretrain=str(tiny.save_model(tmp_path, family)))), naive_model.experience()
    values = critic(exp)
    assert (values == 0).all() and critic.training
    (values - 1).square().sum().backward()
    assert critic.hf_model.score.weight.grad.abs().max() > 0


@pytest.mark.parametrize("prefix", ["score", "value_head"])
def test_a_saved_critic_comes_back(path, tmp_path, prefix):
    critic, exp = load_critic(ModelConfig(pretrain=str(path), value_head_prefix=prefix)), naive_model.experience()
    torch.nn.init.normal_(critic.hf_model.score.weight)
    state = {name: p.detach().clone() for name, p in critic.export_params(iter(critic.named_parameters()))}
    assert f"{prefix}.weight" in state
    critic.hf_model.config.save_pretrained(tmp_path)
    from safetensors.torch import save_file
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in {prefix, "score", "v"}:  # it has the name score too
        again = load_critic(ModelConfig(pretrain=str(path), critic_pretrain=str(tmp_path), value_head_prefix=name))
        assert torch.equal(again(exp), critic(exp)) and again(exp).abs().max() > 0
    hf = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(hf.score.weight, critic.hf_model.score.weight)
    if prefix == "value_head":  # as critics of other programs have it
        state.pop("score.weight")
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match="has no score.weight, but value_head.weight, .* --value_head_prefix value"):
            load_critic(ModelConfig(pretrain=str(path), critic_pretrain=str(tmp_path)))


@pytest.mark.parametrize("head,said", [({}, ""), ({"names": ["a", "b"]}, "the scores a,b and the pooling last"),
                                       ({"pooling": "attn"}, "the scores preference and the pooling attn")])
def test_a_critic_starts_from_a_reward_model_with_a_head_like_its_own(path, tmp_path, head, said):
    config = AutoConfig.from_pretrained(path)
    RewardHead(**head, mean=1.0, std=2.0).write(config)
    hf = AutoModelForSequenceClassification.from_pretrained(path, config=config)
    hf.save_pretrained(tmp_path)
    cfg = ModelConfig(pretrain=str(path), critic_pretrain=str(tmp_path))
    if said:
        with pytest.raises(UserError, match=f"--critic_pretrain .*{said}; a critic has one score per token"):
            load_critic(cfg)
    else:
        critic = load_critic(cfg)
        assert critic.hf_model.score.weight.equal(hf.score.weight) and not hasattr(critic.config, "reward_model")


def test_the_critic_ignores_what_is_for_the_actor(path):
    critic = load_critic(
        ModelConfig(pretrain=str(path), lora_rank=4, freeze_prefix=["lm_head"], gradient_checkpointing=True))
    assert all(p.requires_grad for p in critic.parameters()) and critic.hf_model.is_gradient_checkpointing


@pytest.mark.parametrize("changes", [{}, {"architectures": ["Qwen2Model"]},
                                     {"architectures": None, "reward_model": {}}])  # yapf: disable
def test_a_reward_model_writes_nothing(path, tmp_path, changes):
    """Nor is it a reference; it is a start for a reward model, and a head of another program is none."""
    AutoModelForSequenceClassification.from_pretrained(path, num_labels=1).save_pretrained(tmp_path)
    config, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "config.json"
    file.write_text(json.dumps(config | changes))
    for train in (True, False):
        with pytest.raises(UserError, match="scores texts and does not generate .* lightrft rm trains a reward model"):
            load_actor(ModelConfig(pretrain=str(tmp_path)), train=train)
    file.write_text(json.dumps(config))
    assert load_reward_model(RewardModelConfig(pretrain=str(tmp_path))).hf_model.score.weight.any()
    file.write_text(json.dumps(config | {"architectures": ["Qwen2ForCausalLM"]}))  # TRL's models with a value head
    load_actor(ModelConfig(pretrain=str(tmp_path)))


# -- context ----------------------------------------------------------------------------------------------------------
def test_lengths_beyond_the_context(path):
    check_context(str(path), prompt_max_len=500, generate_max_len=12)
    expected = "--prompt_max_len 500 .* --generate_max_len 13 = 513 .*the 512 positions.*Lower --prompt_max_len or"
    with pytest.raises(UserError, match=expected):
        check_context(str(path), prompt_max_len=500, generate_max_len=13)
    with pytest.raises(UserError, match="^--max_len 513 is more than the 512 positions"):
        check_context(str(path), max_len=513)


@pytest.mark.parametrize("changes, context", [
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 2048),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, 1024),
    ({"max_position_embeddings": 64}, 64),
])  # yapf: disable
def test_the_context_that_a_config_describes(broken, changes, context):
    tiny.change_json(broken / "config.json", rope_parameters=None, **changes)
    check_context(str(broken), max_len=context)
    with pytest.raises(UserError, match=f"the {context} positions"):
        check_context(str(broken), max_len=context + 1)


@pytest.fixture(name="bars")
def fixture_bars():
    """Progress bars of transformers are on, as at the start of a program, whatever other tests have left."""
    before = hf_logging.is_progress_bar_enabled()
    hf_logging.enable_progress_bar()
    yield
    if not before:
        hf_logging.disable_progress_bar()


def test_loading_shows_no_progress_bar(path, capfd, bars):
    load_actor(ModelConfig(pretrain=str(path)))
    assert "Loading weights" not in capfd.readouterr().err and hf_logging.is_progress_bar_enabled()
