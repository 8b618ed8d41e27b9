import pytest
import torch
from peft import PeftModel

from lightrft.config.schema import ModelConfig
from lightrft.models.loader import load_actor
from lightrft.models.lora import merged_params
from lightrft.strategy.distributed import transformer_blocks
from lightrft.tests.support import naive_model, tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(tiny.save_model(tmp_path_factory.mktemp("base")))


def lora_actor(path, **options):
    actor = load_actor(ModelConfig(pretrain=path, lora_rank=4, lora_alpha=8, **options))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return actor


def test_only_adapters_train_and_all_of_them_get_gradients(path):
    actor = lora_actor(path)
    actor(naive_model.experience())[0].sum().backward()
    for name, parameter in actor.named_parameters():
        assert parameter.requires_grad == ("lora_" in name) == (parameter.grad is not None), name
    assert sum("lora_A" in name for name, _ in actor.named_parameters()) == 2 * 7


def test_off_is_the_base_model_and_it_comes_back(path):
    actor, exp = lora_actor(path), naive_model.experience()
    base = load_actor(ModelConfig(pretrain=path), train=False)
    on = actor(exp)[0]
    with torch.no_grad(), actor.adapter_disabled():
        assert torch.equal(actor(exp)[0], base(exp)[0])
    assert (on - base(exp)[0]).abs().max() > 0.1 and torch.equal(actor(exp)[0], on)
    assert all(p.requires_grad == ("lora_" in name) for name, p in actor.named_parameters())
    with pytest.raises(ValueError, match="reference model"):
        base.adapter_disabled()


def test_every_rank_starts_with_the_same_adapters(path):
    torch.manual_seed(1)
    first = load_actor(ModelConfig(pretrain=path, lora_rank=4)).state_dict()
    before = torch.get_rng_state()
    torch.manual_seed(2)
    second = load_actor(ModelConfig(pretrain=path, lora_rank=4)).state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("shuffle", [False, True])
def test_merging_a_stream_equals_peft(path, shuffle):
    actor = lora_actor(path)
    named = list(actor.named_parameters())
    merged = dict(actor.export_params(iter(named[::-1] if shuffle else named)))
    expected = dict(lora_actor(path).model.merge_and_unload().named_parameters())
    assert set(merged) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=0)


def test_what_is_sent_apart_adds_up_to_the_merged_weights(path):
    actor = lora_actor(path)
    merged, apart = (dict(actor.export_params(iter(actor.named_parameters()), merge)) for merge in (True, False))
    adapters = [name.removesuffix(".lora_A.weight") for name in apart if name.endswith(".lora_A.weight")]
    assert set(apart) - set(merged) == {f"{at}.lora_{which}.weight" for at in adapters for which in "AB"} and adapters
    for name, tensor in merged.items():
        at = name.removesuffix(".weight")
        more = apart[f"{at}.lora_B.weight"] @ apart[f"{at}.lora_A.weight"] if at in adapters else 0.0
        torch.testing.assert_close(apart[name] + more, tensor, atol=1e-6, rtol=0)


def test_what_training_changes_of_the_exported_weights(path):
    """Merged, the weights with a trained adapter; apart, its matrices. Neither needs more of the base model."""
    actor = lora_actor(path, target_modules=["q_proj"], freeze_prefix=["layers.1"])
    named = dict(actor.named_parameters())
    for merge, parts in ((True, [""]), (False, [".lora_A", ".lora_B"])):
        sent = actor.export_params(((name, named[name]) for name in sorted(actor.trained_names(merge))), merge)
        assert [name for name, _ in sent] == [f"model.layers.0.self_attn.q_proj{part}.weight" for part in parts]


def test_merged_weights_compute_what_the_adapters_compute(path):
    actor, exp = lora_actor(path), naive_model.experience()
    plain = load_actor(ModelConfig(pretrain=path), train=False)
    plain.hf_model.load_state_dict(dict(actor.export_params(iter(actor.named_parameters()))), strict=False)
    torch.testing.assert_close(plain(exp)[0], actor(exp)[0], atol=2e-5, rtol=0)


def test_a_stream_that_ends_early_is_an_error(path):
    actor = lora_actor(path)
    cut = [(name, p) for name, p in actor.model.named_parameters() if "lora_B" not in name]
    with pytest.raises(ValueError, match="LoRA cannot be merged"):
        list(merged_params(iter(cut), actor.model))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("targets, message", [(["no_such_module"], "no_such_module .* e.g. down_proj$"),
                                              (["lm_head"], "before the head"), (["embed_tokens"], "before the head")])
def test_targets_that_do_not_fit(path, targets, message):
    with pytest.raises(ValueError, match=message):
        load_actor(ModelConfig(pretrain=path, lora_rank=4, target_modules=targets))


def test_options_change_the_adapters(path):
    actor, exp = lora_actor(path, target_modules=["q_proj", "v_proj"], lora_dropout=0.5), naive_model.experience()
    assert isinstance(actor.model, PeftModel) and sum("lora_A" in n for n, _ in actor.named_parameters()) == 2 * 2
    assert not torch.equal(actor(exp)[0], actor(exp)[0])
    actor.eval()
    assert torch.equal(actor(exp)[0], actor(exp)[0])
    other = load_actor(ModelConfig(pretrain=path, lora_rank=2, lora_alpha=8))
    scaling = [transformer_blocks(model)[0].self_attn.q_proj.scaling["default"] for model in (actor, other)]
    assert scaling == [2.0, 4.0]


def test_checkpointing_gives_the_same_adapter_gradients(path):
    """Also with dropout, which draws in the recomputed pass what it drew before."""
    exp = naive_model.experience()
    for dropout in (0.0, 0.5):
        found = []
        for mode in (False, True, "selective"):
            actor = lora_actor(path, gradient_checkpointing=mode, lora_dropout=dropout)
            actor(exp)[0].sum().backward()
            found.append({name: p.grad for name, p in actor.named_parameters() if p.requires_grad})
        assert all(torch.equal(grad, other[name]) for other in found[1:] for name, grad in found[0].items())
