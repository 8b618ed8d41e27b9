import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.attention import PackedLayout
from lightrft.models.packed_model import Critic
from lightrft.models.recomputation import recompute
from lightrft.strategy.distributed import transformer_blocks
from lightrft.strategy.fsdp import shard, units, WrapPolicy
from lightrft.strategy.sharding import local
from lightrft.tests.support import naive_model, tiny
from lightrft.types import Experience


def actor(family: str = "qwen2", **overrides) -> ActorLanguage:
    hf = tiny.model(family, **overrides)
    hf.set_attn_implementation("packed")
    return ActorLanguage(hf)


def grads(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_entropy_and_gradients_equal_the_naive_ones(family, temperature):
    exp, model, twin = naive_model.experience(), actor(family), tiny.model(family)
    twin.set_attn_implementation("eager")
    logprobs, entropy = model(exp, temperature=temperature, entropy=True)
    expected = naive_model.logprobs(twin, exp, temperature)
    assert logprobs.dtype == torch.float32 and (logprobs != 0).sum() == (expected[0] != 0).sum()
    torch.testing.assert_close(logprobs, expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected[1], atol=1e-5, rtol=0)
    weight = torch.randn(exp.num_tokens)
    (logprobs * weight + 0.1 * entropy).sum().backward()
    (expected[0] * weight + 0.1 * expected[1]).sum().backward()
    want = grads(twin)
    assert {f"model.{name}" for name in want} == set(grads(model))
    for name, grad in want.items():
        torch.testing.assert_close(
            model.get_parameter(f"model.{name}").grad, grad, atol=1e-5 * float(grad.abs().max() + 1), rtol=0)


def test_capped_and_scaled_logits():
    exp = naive_model.experience()
    soft, twin = actor("gemma2", final_logit_softcapping=2.0), tiny.model("gemma2", final_logit_softcapping=2.0)
    twin.set_attn_implementation("eager")
    torch.testing.assert_close(soft(exp)[0], naive_model.logprobs(twin, exp)[0], atol=1e-5, rtol=0)
    assert (soft(exp)[0] - actor("gemma2")(exp)[0]).abs().max() > 0.1
    with torch.no_grad():
        plain = actor()
        plain.config.logits_scaling = 4.0
        torch.testing.assert_close(
            plain(exp)[0],
            naive_model.logprobs(tiny.model(), exp, temperature=4.0)[0], atol=1e-5, rtol=0)


def test_without_entropy_there_is_none():
    assert actor()(naive_model.experience())[1] is None


def test_the_first_token_of_a_sequence_has_no_logprob():
    exp = naive_model.experience([4, 1, 6], keep=2.0)
    assert (actor()(exp)[0] == 0).nonzero()[:, 0].tolist() == [0, 4, 5]


def test_packs_do_not_matter():
    exp, model = naive_model.experience(), actor()
    whole = model(exp)[0]
    parts = torch.cat([model(exp.select([i]))[0] for i in range(exp.num_seqs)])
    torch.testing.assert_close(whole, parts, atol=1e-5, rtol=0)


@pytest.mark.parametrize("build", [actor, lambda: Critic(scored("llama"))], ids=["actor", "critic"])
def test_an_empty_mask_gives_zero_gradients_everywhere(build):
    exp, model = naive_model.experience(keep=0.0), build()
    out = model(exp)
    loss = (out if isinstance(out, torch.Tensor) else out[0]).sum()
    loss.backward()
    assert loss.item() == 0 and len(grads(model)) == len(list(model.parameters()))
    assert all((grad == 0).all() for grad in grads(model).values())


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_gradient_checkpointing_changes_no_gradient(family):
    exp, results = naive_model.experience(), []
    for mode in (False, True, "selective"):
        model = actor(family).train()
        recompute(model.hf_model, PolicyModelConfig(gradient_checkpointing=mode))
        layer_calls = count_calls(transformer_blocks(model)[0].mlp)
        model(exp)[0].sum().backward()
        results.append((len(layer_calls), grads(model)))
    assert [calls for calls, _ in results] == [1, 2, 2]
    for name, grad in results[0][1].items():
        assert torch.equal(grad, results[1][1][name]) and torch.equal(grad, results[2][1][name])


def count_calls(module: nn.Module) -> list[int]:
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def test_what_a_strategy_shards():
    model = actor("qwen3")
    assert len(transformer_blocks(model)) == 2 and model.config is model.hf_model.config


def test_a_model_that_mixes_sequences_is_noticed():
    model = actor()
    model.hf_model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="would mix packed sequences"):
        model(naive_model.experience())


def test_media_are_refused():
    exp = naive_model.experience([4])
    exp.media = [("cat.png", )]
    with pytest.raises(ValueError, match="text only"):
        actor()(exp)


def test_export_names_are_those_of_hugging_face():
    model = actor("llama")
    exported = dict(model.export_params(iter(model.named_parameters())))
    assert set(exported) == {name for name, _ in model.hf_model.named_parameters()}


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


def test_a_weight_of_several_layers_is_divided_once(one_rank):
    """Of Zamba 2, whose layers share a block; its gradient is the sum over them."""
    exp, grads = naive_model.experience(), []
    models = [actor("zamba2") for _ in range(2)]
    shard(models[0], init_device_mesh("cpu", (1, )), WrapPolicy(one_unit=0, keep_full=0), False, False)
    assert len(units(models[0])) == 2, "the root, and the layer that is alone"
    for model in models:
        model(exp)[0].sum().backward()
        grads.append({name: local(weight.grad) for name, weight in model.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name], grad, msg=name)


def test_sharded_layers_in_bfloat16_share_one_layout(one_rank, monkeypatch):
    exp, model, layouts = naive_model.experience(), actor(), []
    expected = model(exp)[0]
    build = PackedLayout.build
    monkeypatch.setattr(PackedLayout, "build", lambda *args: layouts.append(build(*args)) or layouts[-1])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*transformer_blocks(model), model):
        fully_shard(module, mp_policy=policy)
    logprobs = model(exp)[0]
    logprobs.sum().backward()
    assert [layout.calls for layout in layouts] == [2] and len(transformer_blocks(model)) == 2
    assert logprobs.dtype == torch.float32 and 0 < (logprobs - expected).abs().mean() < 0.05


def scored(family: str) -> nn.Module:
    from transformers import AutoModelForSequenceClassification
    torch.manual_seed(0)
    config = tiny.config(family, num_labels=1)
    return AutoModelForSequenceClassification.from_config(config, attn_implementation="packed",
                                                          dtype=torch.float32).eval()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_values_come_from_the_state_before(family):
    exp, hf = naive_model.experience(), scored(family)
    with torch.no_grad():
        values = Critic(hf)(exp)
        hf.set_attn_implementation("eager")
        hidden = torch.cat(
            [hf.model(exp.token_ids[None, a:b]).last_hidden_state[0] for a, b in naive_model.bounds(exp)])
        expected = hf.score(hidden)[:, 0].roll(1, 0)
    expected[exp.cu_seqlens[:-1].long()] = 0
    torch.testing.assert_close(values, torch.where(exp.loss_mask, expected, 0.0), atol=1e-5, rtol=0)
    assert values.dtype == torch.float32 and values.abs().max() > 0


def test_the_critic_exports_its_head_under_the_chosen_name_too():
    critic = Critic(scored("qwen2"), "value_head")
    found = dict(critic.export_params(iter(critic.named_parameters())))
    assert found["value_head.weight"] is found["score.weight"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_on_cuda(family):
    exp: Experience = naive_model.experience()
    expected = actor(family)(exp)[0]
    on_gpu = actor(family).cuda()
    torch.testing.assert_close(on_gpu(exp.to("cuda"))[0].cpu(), expected, atol=2e-3, rtol=0)
    half = on_gpu.bfloat16()(exp.to("cuda"))[0]
    half.sum().backward()
    assert half.dtype == torch.float32 and (half.cpu() - expected).abs().mean() < 0.05
