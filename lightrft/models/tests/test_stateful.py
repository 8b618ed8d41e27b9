"""Layers with state begin anew with every sequence of a pack, or with the state of the prompt that it shares."""
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.lora import add_lora
from lightrft.models.packing_check import packing_fault
from lightrft.models.recomputation import recompute
from lightrft.models.state_rows import LayerState, StateRows
from lightrft.models.state_sizes import _unused
from lightrft.models.stateful import adapt, continues, LAYERS, stateful
from lightrft.strategy.mixed_precision import ComputeCopy
from lightrft.tests.support import naive_model, tiny
from lightrft.tests.support.recurrence import in_double
from lightrft.tests.support.shared_prompts import experience
from lightrft.types import Experience
from lightrft.utils.errors import UserError

Grads = dict[str, Tensor]
FAMILIES = [*tiny.HYBRIDS, *tiny.STATEFUL]


@pytest.fixture(scope="module", params=tiny.HYBRIDS)
def models(request):
    """A packed model, and the same with the attention of transformers, which sees one sequence at a time."""
    hf, twin = (tiny.model(request.param).double() for _ in range(2))
    for model, attention in ((hf, "packed"), (twin, "eager")):
        model.set_attn_implementation(attention)
        if "num_experts" in vars(model.config):
            model.set_experts_implementation("eager")  # the others have no float64
    assert stateful(twin)
    with in_double(hf):
        yield ActorLanguage(hf), twin


def weights(exp: Experience) -> Tensor:
    """A number per token that depends on its sequence alone."""
    return torch.cat([torch.randn(end - start, generator=torch.Generator().manual_seed(int(exp.token_ids[end - 1])))
                      for start, end in naive_model.bounds(exp)])  # yapf: disable


def grads(module: torch.nn.Module) -> Grads:
    of_actor = "model." * isinstance(module, ActorLanguage)
    found = {name.removeprefix(of_actor): p.grad for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


@pytest.fixture(scope="module", name="alone")
def alone_fixture(models):
    exp = experience()
    logprobs = naive_model.logprobs(models[1], exp)[0]
    (logprobs * weights(exp)).sum().backward()
    return exp, logprobs.detach(), grads(models[1])


def assert_as_alone(model: ActorLanguage, batches: list[list[int]], alone: tuple[Experience, Tensor, Grads]) -> None:
    """Log-probs to 1e-6 nats, gradients to 5e-6 of the largest element of a weight."""
    exp, expected, sums = alone
    rows = expected.split(exp.lens)
    for batch in batches:
        cut = exp.select(batch)
        logprobs = model(cut)[0]
        torch.testing.assert_close(logprobs, torch.cat([rows[i] for i in batch]).to(logprobs), atol=1e-6, rtol=0)
        (logprobs * weights(cut)).sum().backward()
    found = grads(model)
    for name, grad in sums.items():
        torch.testing.assert_close(found[name], grad, atol=5e-6 * float(grad.abs().max()), rtol=0, msg=name)


@pytest.mark.parametrize("share", [False, True])
def test_packed_is_alone_in_any_order_and_cut(models, alone, share):
    """Against the code of transformers, one sequence at a time."""
    model, count = models[0], alone[0].num_seqs
    model.share_prompts = share
    order = [(7 * i + 3) % count for i in range(count)]
    assert sorted(order) == list(range(count))
    assert_as_alone(model, [list(range(count))], alone)
    assert_as_alone(model, [order[:5], order[5:6], order[6:]], alone)


@pytest.mark.parametrize("family", tiny.STATEFUL)
def test_other_families_are_as_alone(family):
    """In float32; what a family cannot continue, each sequence computes again."""
    exp, hf, twin = experience(), *(tiny.model(family) for _ in range(2))
    hf.set_attn_implementation("packed")
    twin.set_attn_implementation("eager")
    model, expected = ActorLanguage(hf), naive_model.logprobs(twin, exp)[0]
    (expected * weights(exp)).sum().backward()
    sums = grads(twin)
    for model.share_prompts in (False, True):
        logprobs = model(exp)[0]
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
        (logprobs * weights(exp)).sum().backward()
        found = grads(model)
        for name, grad in sums.items():
            torch.testing.assert_close(found[name], grad, atol=1e-5 * float(grad.abs().max() + 1), rtol=0, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_weights_compute_in_bfloat16(family):
    """Buffers stay float32 then: decays, factors."""
    exp, models = experience(), [
        tiny.model(family, attn_implementation="packed", initializer_range=0.06) for _ in range(2)
    ]
    exact = ActorLanguage(models[0])(exp)[0].detach()
    ComputeCopy(models[1])
    logprobs = ActorLanguage(models[1])(exp)[0]
    assert 0 < float((logprobs.detach() - exact).abs().mean()) < 0.01
    logprobs.sum().backward()
    assert all(weight.grad.dtype == torch.float32 for weight in models[1].parameters() if weight.grad is not None)


@torch.no_grad()
def test_decays_are_not_rounded_to_bfloat16():
    """Of MiniMax: 300 tokens in blocks, as they are trained, and one by one, as they are drawn."""
    model, runs, drawn = tiny.model("minimax", num_attention_heads=16, attn_implementation="packed"), [], []
    ActorLanguage(model)
    ComputeCopy(model)
    hidden = torch.randn(1, 300, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache = SimpleNamespace(mix=lambda index, rows, layer: runs.append(layer) or layer(rows, LayerState()))
    whole = stateful(model)[0](hidden, kv_cache=cache, position_embeddings=None, attention_mask=None)[0]
    state = LayerState()
    for token in hidden.split(1, 1):
        drawn += runs[0](token, state)
        state = LayerState(state.states)
    assert float((torch.cat(drawn, 1) - whole).float().abs().mean() / whole.float().abs().mean()) < 0.005


def test_a_shared_prompt_runs_once_through_the_layers_with_state(models):
    model, exp, tokens = models[0], experience(), []
    layer = stateful(model.hf_model)[0]
    hook = layer.in_proj_qkv if hasattr(layer, "in_proj_qkv") else layer.in_proj_qkvz
    with hook.register_forward_hook(lambda module, args, out: tokens.append(out.shape[:2].numel())):
        for model.share_prompts in (False, True):
            model(exp)
            tokens.append(0)
    first = tokens.index(0)
    assert sum(tokens[first + 1:]) < 0.8 * sum(tokens[:first])


def test_a_pack_that_carries_state_on_is_noticed(models, alone, monkeypatch):
    """The comparison can fail: one sequence begins with the state of another, or with none of its prompt."""
    model = models[0]
    right = StateRows.__init__

    def joined(self, lens, before, device, ends=frozenset()):
        right(self, [sum(lens)], None, device)

    def unshared(self, lens, before, device, ends=frozenset()):
        right(self, lens, None, device)

    for broken in (joined, unshared):
        monkeypatch.setattr(StateRows, "__init__", broken)
        for model.share_prompts in (broken is unshared, ):
            with pytest.raises(AssertionError):
                assert_as_alone(model, [list(range(alone[0].num_seqs))], alone)
        model.zero_grad()


def counting(rows: Tensor, state: LayerState) -> tuple[Tensor, Tensor]:
    """A layer: sums up to each token, and a convolution over the last two tokens."""
    sums = rows.cumsum(1) + (state.recurrent_states[0][:, None] if state.has_previous_state(0) else 0)
    tail = state.update_conv_state(rows.transpose(1, 2), 0, conv_kernel_size=2)
    pairs = torch.nn.functional.pad(tail, (1, 0))[..., -rows.shape[1] - 1:]
    state.update_recurrent_state(sums[:, -1], 0)
    return sums, (pairs[..., 1:] + pairs[..., :-1]).transpose(1, 2)


def test_states_are_handed_down_branches_of_any_depth():
    lens, before = [5, 3, 40, 1, 70, 2, 9, 33], [-1, 0, 1, 2, 2, -1, 3, -1]
    hidden = torch.randn(sum(lens), 3, dtype=torch.float64, requires_grad=True)
    rows = StateRows(lens, before, "cpu", ends=frozenset([7]))
    (sums, pairs), states = rows.run(hidden, counting)
    parts, whole = hidden.split(lens), []
    for index, part in enumerate(parts):
        whole.append(torch.cat([whole[before[index]], part]) if before[index] >= 0 else part)
    alone = [counting(row[None], LayerState()) for row in whole]
    for place, found in enumerate((sums, pairs)):
        expected = torch.cat([outs[place][0, -n:] for outs, n in zip(alone, lens)])
        torch.testing.assert_close(found, expected)
        mine, = torch.autograd.grad(found.square().sum(), hidden, retain_graph=True)
        right, = torch.autograd.grad(expected.square().sum(), hidden, retain_graph=True)
        torch.testing.assert_close(mine, right)
    assert sorted(rows.order) == [0, 1, 2, 3, 7]
    torch.testing.assert_close(states["recurrent0"], torch.stack([whole[index].sum(0) for index in rows.order]))
    assert len(StateRows([5, 3, 9, 20, 7], [-1, 0, 0, 0, -1], "cpu").calls) == 3


@pytest.mark.parametrize("family", [each for each in FAMILIES if continues(tiny.model(each))])
def test_layers_hand_down_the_state_after_one_token(family):
    """Some write it into the one before, which the backward pass reads; some limit time steps of several tokens alone.
    """
    model, runs, lens, before = tiny.model(family), [], [5, 1, 1, 3, 2], [-1, 0, 1, 2, 1]
    adapt(model)
    layer = stateful(model)[0]
    if hasattr(layer, "time_step_limit"):
        layer.dt_bias.data.fill_(-7)  # time steps below the least of Nemotron-H and Zamba 2
    cache = SimpleNamespace(mix=lambda index, rows, run: runs.append(run) or run(rows, LayerState()))
    hidden = torch.randn(sum(lens), 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    layer(hidden[None], kv_cache=cache, **dict.fromkeys(_unused(type(layer).__mro__[2])))
    whole, parts = [], hidden.split(lens)
    for index, part in enumerate(parts):
        whole.append(torch.cat([whole[before[index]], part]) if index else part)
    found = StateRows(lens, before, "cpu").run(hidden, runs[0])[0][0]
    expected = torch.cat([runs[0](row[None], LayerState())[0][0, -n:] for row, n in zip(whole, lens)])
    mine, right = (torch.autograd.grad(out.square().sum(), hidden)[0] for out in (found, expected))
    for values, wanted in ((found, expected), (mine, right)):
        torch.testing.assert_close(values, wanted, atol=1e-5 * float(wanted.detach().abs().max()), rtol=0)


RULE = "torch_chunk_gated_delta_rule"


def test_kernels_of_other_packages_are_not_taken(monkeypatch):
    """None has been compared on packed sequences: where transformers alone would call an installed kernel, its own code
    in torch runs. transformers asks for the package when it is imported."""

    def kernel(*args, **named):
        raise RuntimeError("the kernel is called")

    module = sys.modules[type(stateful(tiny.model("qwen3_5"))[0]).__module__]
    rules = SimpleNamespace(chunk_gated_delta_rule=kernel)
    monkeypatch.setitem(sys.modules, "installed", SimpleNamespace(ops=SimpleNamespace(gated_delta_rule=rules)))
    bind = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "installed")
    monkeypatch.setattr(module, RULE, bind(inspect.unwrap(getattr(module, RULE))))
    with pytest.raises(RuntimeError, match="the kernel is called"):
        tiny.model("qwen3_5")(input_ids=torch.arange(5, 25)[None])
    ActorLanguage(tiny.model("qwen3_5", attn_implementation="packed"))(experience())


def test_the_kernel_takes_the_arguments_of_the_layer(monkeypatch):
    """Of flash-linear-attention, where it can be imported; it stays off until it has been compared."""
    fla = pytest.importorskip("fla.ops.gated_delta_rule", reason="needs flash-linear-attention", exc_type=ImportError)
    module = sys.modules[type(stateful(tiny.model("qwen3_5"))[0]).__module__]
    calls, rule = [], inspect.unwrap(getattr(module, RULE))
    monkeypatch.setattr(module, RULE, lambda *args, **named: calls.append((args, named)) or rule(*args, **named))
    tiny.model("qwen3_5")(input_ids=torch.arange(5, 25)[None])
    for args, named in calls:
        inspect.signature(fla.chunk_gated_delta_rule).bind(*args, **named)
    assert len(calls) == 1


@pytest.mark.parametrize("mode", [True, "selective"])
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_recomputed_gradients_are_equal(family, mode):
    exp, sums = experience().select([0, 3, 4, 5, 8]), []
    for setting in (False, mode):
        hf = tiny.model(family, attn_implementation="packed")
        recompute(hf, PolicyModelConfig(gradient_checkpointing=setting))
        model = ActorLanguage(hf).train()
        (model(exp)[0] * weights(exp)).sum().backward()
        sums.append(grads(model))
    assert sums[0].keys() == sums[1].keys()
    for name, grad in sums[0].items():
        torch.testing.assert_close(sums[1][name], grad, atol=1e-6 * float(grad.abs().max()), rtol=0, msg=name)


ADAPTED = {
    "qwen3_5": "in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj gate_proj",
    "qwen3_next": "in_proj_qkvz in_proj_ba out_proj shared_expert_gate",
    "jamba": "in_proj x_proj out_proj",
    "nemotron_h": "in_proj",
    "kimi_linear": "b_proj f_a_proj f_b_proj g_a_proj g_b_proj kv_b_proj",
    "lfm2": "in_proj out_proj w1",
    "minimax": "qkv_proj output_gate out_proj",
    "olmo_hybrid": "a_proj b_proj g_proj",
    **dict.fromkeys(("bamba", "granitemoehybrid", "zamba2"), "in_proj out_proj"),
    "falcon_h1": "in_proj",
}  # yapf: disable
REFUSED = {"jamba": "dt_proj", "qwen3_next": "gate_proj", "nemotron_h": "out_proj", "falcon_h1": "out_proj",
           "zamba2": "q_proj"}  # yapf: disable


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_on_all_linear_layers_merge(family):
    """Each has a gradient, and the merged weights compute what the adapters do; layers that peft or the family would
    get wrong have none."""
    exp, base = experience().select([0, 3, 4, 5, 8]), tiny.model(family, attn_implementation="packed")
    model = ActorLanguage(add_lora(base, 2, 4, 0.0, ["all-linear"]))
    adapters = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
    ends = {name.partition(".lora_")[0].rpartition(".")[2] for name in adapters}
    assert ends >= {*ADAPTED[family].split(), "q_proj"} - {REFUSED.get(family)} and REFUSED.get(family) not in ends
    for name, weight in adapters.items():
        weight.data.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) / 5)
    logprobs = model(exp)[0]
    logprobs.sum().backward()
    assert all(weight.grad is not None for weight in adapters.values())
    merged = tiny.model(family, seed=1, attn_implementation="packed")
    merged.load_state_dict(dict(model.export_params(iter(model.state_dict().items()))))
    torch.testing.assert_close(ActorLanguage(merged)(exp)[0], logprobs, atol=1e-4, rtol=0)
    if family in REFUSED:
        with pytest.raises(UserError, match=f"matches .*{REFUSED[family]}, a Linear, which cannot have an adapter"):
            add_lora(tiny.model(family), 2, 4, 0.0, [REFUSED[family]])


@pytest.mark.parametrize("family", tiny.HYBRIDS)
def test_a_small_copy_shows_that_they_are_right(family, monkeypatch):
    config = tiny.config(family)
    assert packing_fault(config) == ""
    for name in [*LAYERS]:
        monkeypatch.delitem(LAYERS, name)
    config.vocab_size += 1  # another config, not the stored answer
    assert "called packed attention 1 times in 2 layers" in packing_fault(config)
