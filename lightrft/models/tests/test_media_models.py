"""Models with towers: what is frozen, critics, adapters, plans."""
from dataclasses import replace
from functools import partial

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2_5OmniConfig

from lightrft.config.schema import Config, ModelConfig, StrategyConfig
from lightrft.models.activations import ModelShape, TowerShape
from lightrft.models.architectures import modality_of
from lightrft.models.config_json import check_context, parameter_shapes
from lightrft.models.loader import load_actor, load_critic, load_exported
from lightrft.models.lora import hf_name
from lightrft.models.recomputation import recompute
from lightrft.preflight.cost import known_model
from lightrft.preflight.hardware import Device
from lightrft.preflight.memory import memory
from lightrft.strategy.optimizer import OptimSpec
from lightrft.strategy.strategy import get_strategy
from lightrft.tests.support import tiny, tiny_vision
from lightrft.tests.support.media_rig import MediaRig
from lightrft.tests.support.saved_bytes import saved_bytes
from lightrft.tests.support.tiny_vision import FAMILIES
from lightrft.utils.errors import UserError

pytest.importorskip("torchvision")


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    folder = tiny_vision.save_model(tmp_path_factory.mktemp("model"), "qwen3_vl", tied=False)
    return MediaRig(folder, {"image": tiny_vision.PICTURE})


def test_of_a_whole_qwen2_5_omni_the_thinker_is_loaded(tmp_path):
    """As published: under one prefix, beside what speaks, which the memory plan does not count."""
    folder, file = FAMILIES["qwen2_5_omni_thinker"].save(tmp_path, False), tmp_path / "model.safetensors"
    path, weights, size = str(folder), load_file(file), known_model(str(folder))[0]
    alone = load_actor(ModelConfig(pretrain=path)).hf_model.state_dict()
    speaks = {"talker.model.norm.weight": torch.zeros(7), "token2wav.layer.weight": torch.zeros(3)}
    save_file({f"thinker.{name}": weight for name, weight in weights.items()} | speaks, file, {"format": "pt"})
    Qwen2_5OmniConfig(thinker_config=AutoConfig.from_pretrained(folder).to_dict()).save_pretrained(folder)
    hf = load_actor(ModelConfig(pretrain=path)).hf_model
    assert hf.config.model_type == "qwen2_5_omni_thinker" and hf.config.name_or_path == path
    exported = load_exported(path)
    for state in (hf.state_dict(), exported.state_dict()):
        assert state.keys() == alone.keys() and all(torch.equal(state[name], each) for name, each in alone.items())
    exported.save_pretrained(tmp_path / "exported")
    written = load_file(tmp_path / "exported" / "model.safetensors")
    assert written.keys() == weights.keys() and all(torch.equal(written[name], each) for name, each in weights.items())
    assert {"model.embed_tokens.weight", "audio_tower.conv1.weight", "visual.blocks.0.norm1.weight"} <= written.keys()
    assert known_model(path)[0] == size
    places = load_actor(ModelConfig(pretrain=path), deferred=True).files.places
    assert {place.key for place in places.values()} == {f"thinker.{name}" for name in weights}


PUBLISHED = {  # some names in the checkpoints of the hub; vLLM's loader reads the exports of all families
    "gemma3": ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight",
               "vision_tower.vision_model.embeddings.patch_embedding.weight",
               "multi_modal_projector.mm_input_projection_weight"),
    "qwen2_audio": ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight",
                    "audio_tower.conv1.weight", "multi_modal_projector.linear.weight"),
    "qwen2_5_vl": ("model.embed_tokens.weight", "lm_head.weight", "visual.patch_embed.proj.weight"),
    "qwen3_vl_moe": ("model.language_model.embed_tokens.weight", "model.visual.patch_embed.proj.weight",
                     "model.language_model.layers.0.mlp.experts.gate_up_proj"),
    "mixtral": ("model.layers.0.block_sparse_moe.experts.3.w2.weight", "lm_head.weight"),
}  # yapf: disable


@pytest.mark.parametrize("family", PUBLISHED)
def test_exports_are_as_published(family, tmp_path):
    """With adapters too, critics, and those of a folder with the names of modules, as earlier versions wrote it."""
    if family in FAMILIES:
        tiny_vision.save_model(tmp_path / "base", family, tied=False)
    else:
        tiny.save_model(tmp_path / "base", family, tie_word_embeddings=False)
    strategy = get_strategy(StrategyConfig(strategy="single"))
    strategy.setup()
    for load, options in ((load_actor, {"lora_rank": 2}), (load_critic, {}), (load_actor, {})):
        model = load(ModelConfig(pretrain=str(tmp_path / "base"), **options))
        strategy.save_model(strategy.prepare(model), tmp_path / "out")
        hf, written = model.hf_model, load_file(tmp_path / "out" / "model.safetensors")
        read, report = type(hf).from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(report.values()), report
        assert {name for name in PUBLISHED[family] if "lm_head" not in name or load is load_actor} <= written.keys()
        if family == "qwen3_vl_moe":
            assert written["model.language_model.layers.0.mlp.experts.down_proj"].shape == (4, 96, 64)
        if not options:
            assert all(read.state_dict()[name].equal(each) for name, each in hf.state_dict().items())
        if load is load_critic:
            base = load_actor(ModelConfig(pretrain=str(tmp_path / "base"))).hf_model
            save_file(base.state_dict(), tmp_path / "base" / "model.safetensors", {"format": "pt"})


def actor_of(rig, **options):
    actor = load_actor(ModelConfig(pretrain=str(rig.folder), **options))
    actor.modality.media = rig.source
    return actor


@pytest.mark.parametrize("words, frozen", [
    (["visual"], ("model.visual.", )),
    (["language"], ("model.language_model.", "lm_head.")),
    (["projector"], ("model.visual.merger.", "model.visual.deepstack_merger_list.")),
    (["visual.blocks", "layers.1"], ("model.visual.blocks.", "model.language_model.layers.1.")),
])
def test_frozen_parts_have_no_gradients_and_the_rest_has(rig, words, frozen, capfd):
    actor = actor_of(rig, freeze_prefix=words)
    actor(rig.pack(rig.samples()))[0].sum().backward()
    named = {name.removeprefix("model."): parameter for name, parameter in actor.named_parameters()}
    without = {name for name, parameter in named.items() if parameter.grad is None}
    assert without == {name for name in named if name.startswith(frozen)}
    count = sum(named[name].numel() for name in without)
    assert f"--freeze_prefix {' '.join(words)}: {count:,} of " in capfd.readouterr().err


def test_a_frozen_tower_keeps_nothing_for_a_backward_pass(rig):
    for options, graph in (({}, True), ({"freeze_prefix": ["visual"]}, False)):
        actor = actor_of(rig, gradient_checkpointing=True, **options)
        tower = actor.modality.family.towers["image"]
        found = tower.of(actor.hf_model, "image", [rig.source.tensors("image:0")])
        assert all(each.requires_grad is graph for each in (*found.each, *found.levels[0]))
    with torch.no_grad():
        assert torch.equal(actor(rig.pack(rig.samples()))[0], rig.actor(rig.pack(rig.samples()))[0])


def test_recomputation_changes_no_gradient(rig):
    """Of the decoder and of the tower, with all and with some of the activations of a layer computed again."""
    gradients = []
    for mode in (False, True, "selective"):
        actor = actor_of(rig, gradient_checkpointing=mode)
        actor(rig.pack(rig.samples()))[0].sum().backward()
        gradients.append({name: p.grad for name, p in actor.named_parameters() if p.grad is not None})
    assert any("visual" in name for name in gradients[0])
    for name, grad in gradients[0].items():
        assert torch.equal(grad, gradients[1][name]) and torch.equal(grad, gradients[2][name]), name


def test_media_that_do_not_fit_their_tokens_are_named_by_sequence(rig):
    """Pictures of two prompts are exchanged: there are as many tokens as features, but not in each."""
    (first, response, own), _, (second, _, others) = rig.samples()[:3]
    assert own != others
    exp = rig.pack([(first, response, others[:1]), (second, response, (own[0], *others[1:]))])
    with pytest.raises(
            UserError, match=r"sequence 0 of a micro-batch has \d+ image tokens for \d+ features of 1 media "
            rf"{others[0]}: the processor"):
        rig.actor(exp)


def test_words_that_name_nothing_are_refused_with_the_parts(rig):
    with pytest.raises(UserError, match="'audio' matches no parameter; parts of this model are language, visual, proj"):
        actor_of(rig, freeze_prefix=["audio"])
    with pytest.raises(UserError, match="leaves nothing to train. Leave out one of the parts language, visual, proj"):
        actor_of(rig, freeze_prefix=["visual", "language"])


def test_a_projector_inside_of_a_tower_is_trained_alone(rig):
    alone = actor_of(rig, freeze_prefix=["language", "blocks", "patch_embed", "pos_embed"])
    trained = [name for name, weight in alone.named_parameters() if weight.requires_grad]
    assert trained and all("merger" in name for name in trained)


@pytest.mark.parametrize("family, prefix", [("qwen3_vl", "value_head"), *((name, "score") for name in FAMILIES)])
def test_a_critic_of_pictures(family, prefix, tmp_path):
    """From a policy all values are 0; from its export they are those of Hugging Face, at the tokens that
    the policy drew, packed as alone."""
    folder = FAMILIES[family].save(tmp_path / "policy", tied=family == "qwen3_vl")
    rig = MediaRig(folder, FAMILIES[family].placeholders, FAMILIES[family])
    critic = load_critic(ModelConfig(pretrain=str(folder), value_head_prefix=prefix))
    critic.modality.media = rig.source
    samples = rig.samples()
    exp = rig.pack(samples)
    assert not critic(exp).any() and "lm_head.weight" not in critic.hf_model.state_dict()
    torch.nn.init.normal_(critic.hf_model.score.weight)
    strategy = get_strategy(StrategyConfig(strategy="single"))
    strategy.setup()
    strategy.save_model(strategy.prepare(critic, OptimSpec(1e-3)), tmp_path / "critic")
    cfg = ModelConfig(pretrain=str(folder), critic_pretrain=str(tmp_path / "critic"), value_head_prefix=prefix)
    again = strategy.prepare(partial(load_critic, cfg, deferred=True), OptimSpec(1e-3)).model
    again.modality.media = rig.source
    values = again(exp)
    assert torch.equal(values, critic(exp)) and not values[~exp.loss_mask].any()
    alone = torch.cat([again(rig.pack([sample])) for sample in samples])
    assert (values - alone).norm() < 1e-5 * values.norm()
    plain = rig.plain(samples, critic.hf_model.score)
    assert (values[exp.loss_mask] - plain).norm() < 1e-5 * plain.norm()
    values.sum().backward()
    unread = {name for name, parameter in again.named_parameters() if parameter.grad is None}
    assert all("_tower." in name for name in unread), "only towers have layers that nothing reads"


@pytest.mark.parametrize("words, parts", [
    (["all-linear"], ("model.language_model.", )),
    (["visual"], ("model.visual.", )),
    (["projector"], ("model.visual.merger.", "model.visual.deepstack_merger_list.")),
    (["language", "visual"], ("model.language_model.", "model.visual.")),
    (["qkv"], ("model.visual.blocks.0.attn.qkv", "model.visual.blocks.1.attn.qkv")),
])
def test_adapters_on_parts(rig, words, parts):
    linear = [name for name, module in rig.hf.named_modules() if isinstance(module, torch.nn.Linear)]
    adapters_learn_and_merge(rig, words, {name for name in linear if name.startswith(parts)})


def test_adapters_on_a_bare_matrix(tmp_path):
    """Gemma-3's projector."""
    folder = FAMILIES["gemma3"].save(tmp_path, tied=False)
    rig = MediaRig(folder, FAMILIES["gemma3"].placeholders)
    words = ["projector", "down_proj"]
    own = {name for name, _ in rig.hf.named_modules() if name.endswith(words[1])}
    adapters_learn_and_merge(rig, words, {"model.multi_modal_projector"} | own)
    actor = actor_of(rig, lora_rank=2, target_modules=words)
    changed = {hf_name(name.removeprefix("model.")) for name in actor.trained_names() if ".lora_" not in name}
    assert changed == {"model.multi_modal_projector.mm_input_projection_weight", *(f"{name}.weight" for name in own)}
    with pytest.raises(UserError,
                       match="--lora_dropout 0.1: model.multi_modal_.* is a bare matrix, .* set 0, or leave"):
        actor_of(rig, lora_rank=2, lora_dropout=0.1, target_modules=words)


def adapters_learn_and_merge(rig, words, expected):
    """Those on ``words`` are on ``expected`` alone; all of them learn, and merged weights compute what they compute."""
    actor = actor_of(rig, lora_rank=2, target_modules=words)
    exp = rig.pack(rig.samples())
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in actor.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    found = actor(exp)[0]
    found.sum().backward()
    trained = {name for name, parameter in actor.named_parameters() if parameter.grad is not None}
    adapted = {hf_name(name.removeprefix("model.")).partition(".lora_")[0] for name in trained}
    assert adapted == expected and all(".lora_" in name for name in trained)
    assert all(parameter.requires_grad == (name in trained) for name, parameter in actor.named_parameters())
    plain = load_actor(ModelConfig(pretrain=str(rig.folder)), train=False)
    plain.modality.media = rig.source
    merged = dict(actor.export_params(iter(actor.named_parameters())))
    assert merged.keys() == dict(plain.hf_model.named_parameters()).keys()
    apart = dict(actor.export_params(iter(actor.named_parameters()), merge=False))
    assert {name.partition(".lora_")[0] for name in apart if ".lora_" in name} == expected
    before = plain(exp)[0]
    plain.hf_model.load_state_dict(merged)
    torch.testing.assert_close(plain(exp)[0], found, atol=2e-5, rtol=0)
    assert (before - found).abs().max() > 1e-3


def test_an_export_holds_the_adapters_and_the_merged_weights(rig, tmp_path):
    """Both are what PEFT and transformers load, and agree."""
    strategy = get_strategy(StrategyConfig(strategy="single"))
    strategy.setup()
    actor = actor_of(rig, lora_rank=2, target_modules=["all-linear", "visual"])
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.02)
    strategy.save_model(strategy.prepare(actor, OptimSpec(1e-3)), tmp_path)
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path)
    base = AutoModelForImageTextToText.from_pretrained(rig.folder)
    inputs = rig.source.prompt(*rig.rows[0])
    with torch.no_grad():
        before = base(**inputs).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(**inputs).logits
        torch.testing.assert_close(merged(**inputs).logits, adapted, atol=1e-5, rtol=0)
    assert (adapted - before).abs().max() > 1e-2


@pytest.mark.parametrize("mode", [False, "selective", True], ids=["none", "selective", "all"])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "llava", "gemma3", "internvl", "qwen2_audio"])
def test_what_a_tower_keeps(family, mode, tmp_path):
    """Half to all of the bytes that autograd saves, for towers of 8 layers: no plan that fits is refused."""
    tiny = FAMILIES[family]
    deep = {"depth": 8, "num_hidden_layers": 8, "encoder_layers": 8, "hidden_size": 64, "d_model": 64, "embed_dim": 64,
            "intermediate_size": 160, "encoder_ffn_dim": 160}  # yapf: disable
    config = {
        side: value | {name: deep.get(name, own)
                       for name, own in value.items()} if side in ("vision_config", "audio_config") else value
        for side, value in tiny.config.items()
    }
    tiny = replace(tiny, config=config)
    rig = MediaRig(tiny.save(tmp_path, tied=False), tiny.placeholders, tiny)
    recompute(rig.hf, ModelConfig(gradient_checkpointing=mode))
    rig.hf.train()
    kind = next(iter(tiny.placeholders))
    media = [rig.source.tensors(f"{kind}:{i}") for i in range(3)]
    found, out = saved_bytes(rig.actor, lambda: rig.actor.modality.family.towers[kind].of(rig.hf, kind, media))
    (tower, ) = TowerShape.all_of(rig.hf.config)
    windows = [one.tensors["input_features"] for one in media if kind == "audio"]  # whole ones, also of short sounds
    patches = sum(mel.shape[-1] // 2 for mel in windows) or sum(map(len, out.each)) * tower.per_token
    assert 0.5 * found <= tower.kept(patches, 4, mode) <= found


def test_an_audio_tower_that_nothing_hears_with_is_no_projector():
    """Gemma-4 with ``audio_config``, of which only pictures are taken."""
    config = AutoConfig.for_model("gemma4", audio_config={"num_hidden_layers": 1})
    modality = modality_of(config, "m")
    with torch.device("meta"):
        hf = modality.auto_class.from_config(config)
    parts = modality.parts(hf, [name for name, _ in hf.named_parameters()])
    assert parts.keys() == {"language", "visual", "audio", "projector"}
    assert parts["audio"] and all(name.startswith("model.audio_tower.") for name in parts["audio"])
    assert parts["projector"] and all(name.startswith("model.embed_") for name in parts["projector"])


def test_adapters_on_nothing_are_refused(rig):
    with pytest.raises(UserError, match="--target_modules audio matches no module; .* language, visual, projector"):
        actor_of(rig, lora_rank=2, target_modules=["audio"])


def test_plans_and_limits_read_the_decoder(rig):
    """Its widths and positions, and those of its tower; the parameters of all parts."""
    path = str(rig.folder)
    assert parameter_shapes(path) == {name: tuple(one.shape) for name, one in rig.hf.named_parameters()}
    size, shape = known_model(path)
    assert size.total == sum(one.numel() for one in rig.hf.parameters())
    assert shape == ModelShape(2, 64, 64, 64, 32, 2, (TowerShape("visual", 2, 32, 48, 2, 4, 2 * 3 * 14**2), ),
                               rig.hf.get_input_embeddings().num_embeddings,
                               head_norms=any("q_norm" in name for name, _ in rig.hf.named_parameters()),
                               ends_alike=True)  # attention is as wide as the MLP
    device, config = Device("cpu", 8 << 30, 8 << 30), Config()
    rows = memory(config, 1, size, device, shape=shape)
    prompts = -(-16384 // 2048 // 8)  # of a micro-batch: its samples, 8 for each prompt
    row = rows[f"tower, {1024 * prompts * 4:,} patches"]
    assert row[2] == shape.towers[0].kept(1024 * prompts * 4, 4) > 0 and sum(row) == row[2]
    config.model.freeze_prefix = ["visual"]
    assert not any("tower" in name for name in memory(config, 1, size, device, shape=shape))
    with pytest.raises(UserError, match="600 is more than the 512 positions"):
        check_context(path, max_len=600)
