"""The estimate of activations against the tensors that autograd really saves, and against the peak of a backward
pass."""
import weakref
from dataclasses import replace
from inspect import signature
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.profiler import profile, ProfilerActivity
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.models import attention, attention_kernels
from lightrft.models.activations import Activations, LayerKind, Mixture, ModelShape
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.lora import add_lora
from lightrft.models.packed_model import PackedModel
from lightrft.models.recomputation import recompute
from lightrft.ops import logprobs
from lightrft.tests.support import naive_model, tiny
from lightrft.tests.support.fake_cuda import fake_cuda, tensor
from lightrft.tests.support.saved_bytes import saved_bytes

SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 192}
BELOW = 0.07  # share that the estimate may miss
MODES, IDS = (False, "selective", True), ("none", "selective", "all")
EXP = naive_model.experience([128, 64, 192], keep=2.0)  # long enough that attention pads nothing; whole chunks
TWO = {"num_hidden_layers": 2}
EXPERTS = TWO | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
OWN: dict[str, dict[str, Any]] = {  # sizes in which no width is that of another part
    "qwen3_5": TWO, "qwen3_5_moe": EXPERTS, "qwen3_next": EXPERTS, "bamba": TWO | {"mamba_d_head": 32},
    "granitemoehybrid": TWO | {"mamba_d_head": 32}, "falcon_h1": TWO, "jamba": TWO | {"mamba_dt_rank": 6},
    "kimi_linear": TWO, "lfm2": TWO, "minimax": TWO, "nemotron_h": {"num_hidden_layers": 3}, "olmo_hybrid": TWO,
    "zamba2": TWO | {"n_mamba_heads": 8, "layers_block_type": ["mamba", "hybrid"]},
}  # yapf: disable
MISSED = {"granitemoehybrid": 0.16, "lfm2": 0.23, "nemotron_h": 0.16, "olmo_hybrid": 0.18, "qwen3_5_moe": 0.08,
          "zamba2": 0.37}  # yapf: disable


def actor_of(family: str, dtype: torch.dtype, mode: bool | str, lora: bool) -> ActorLanguage:
    hf = tiny.model(family, attn_implementation="packed", **SIZES | OWN.get(family, {})).to(dtype)
    model = add_lora(hf, 4, 16, 0.0, ["all-linear"]).to(dtype) if lora else hf
    recompute(hf, PolicyModelConfig(gradient_checkpointing=mode, lora_rank=4 * lora))
    return ActorLanguage(model, 1).train()


def estimate(actor: ActorLanguage, dtype: torch.dtype, recompute: bool | str, lora: bool) -> Activations:
    shape = ModelShape.of(actor.hf_model.config)
    assert shape is not None
    return Activations(shape, EXP.num_tokens, dtype.itemsize, recompute, lora)


@pytest.mark.parametrize("family,options", [("qwen2", {}), ("llama", {"num_key_value_heads": 1}),
                                            ("gemma3", {"layer_types": ["full_attention"] * 4}), ("qwen3_5", {})])
def test_cost_of_attention(family: str, options: dict[str, Any]) -> None:
    """The share of multiplications that grows with the square of the length; torch counts masked ones too."""
    model = tiny.model(family, attn_implementation="eager", **SIZES | OWN.get(family, {}) | options)
    flops = {}
    for length in (64, 128):
        with FlopCounterMode(display=False) as counter:
            model(input_ids=torch.ones(1, length, dtype=torch.long))
        flops[length] = counter.get_total_flops()
    square = (flops[128] - 2 * flops[64]) / (128**2 - 2 * 64**2)
    linear = flops[64] / 64 - 64 * square
    assert PackedModel(model).attention == pytest.approx(square / linear / 2, rel=0.01)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("mode", MODES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "qwen3_5", "bamba"])
def test_what_is_kept(family: str, dtype: torch.dtype, mode: bool | str, lora: bool) -> None:
    """Never more than what is saved, so that no plan is refused that fits."""
    actor = actor_of(family, dtype, mode, lora)
    (found, _), expected = saved_bytes(actor, lambda: actor(EXP)), estimate(actor, dtype, mode, lora).kept
    assert (1 - BELOW) * found <= expected <= found


@pytest.mark.parametrize("family", sorted({"mixtral", *OWN} - {"qwen3_5", "bamba"}))
def test_what_other_families_keep(family: str) -> None:
    """Mixtures, MLPs without a gate, and layers with state. Some keep more than the sums know."""
    for dtype, mode, lora in product((torch.float32, torch.bfloat16), MODES, (False, True)):
        actor = actor_of(family, dtype, mode, lora)
        (found, _), expected = saved_bytes(actor, lambda: actor(EXP)), estimate(actor, dtype, mode, lora).kept
        assert (1 - MISSED.get(family, BELOW)) * found <= expected <= found, (dtype, mode, lora, expected / found)


@pytest.mark.parametrize("repeated", [False, True], ids=["as they are", "repeated"])
@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_what_the_kernel_of_a_gpu_keeps_of_grouped_heads(mode: bool | str, repeated: bool,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a release whose kernel has no option for them: it is asked whether it takes them."""
    real, heads = varlen_attn, dict(num_attention_heads=4, num_key_value_heads=1)
    taken = {"enable_gqa": True} if "enable_gqa" in signature(real).parameters else {}

    def kernel(q: Tensor, k: Tensor, *rest: Any, **named: Any) -> Any:
        assert not repeated or q.shape[1] == k.shape[1]
        return real(q, k, *rest, **named, **taken)

    for module in (attention, attention_kernels):
        monkeypatch.setattr(module, "varlen_kernel", lambda: (kernel, frozenset(("scale", "window_size"))))
    with fake_cuda():
        hf = tiny.model("qwen2", attn_implementation="packed", **SIZES | heads).to(torch.bfloat16)
        recompute(hf, PolicyModelConfig(gradient_checkpointing=mode))
        actor, exp = ActorLanguage(hf, 1).train().to("cuda"), EXP.to("cuda")
        assert attention_kernels.repeats_heads() is repeated
        found, _ = saved_bytes(actor, lambda: actor(exp))
        expected = replace(estimate(actor, torch.bfloat16, mode, False), repeated=repeated)
        assert 0.93 * found <= expected.kept <= found


def peak_bytes(actor: ActorLanguage) -> int:
    """Most bytes allocated at once in a forward and backward pass that adds to gradients of an earlier one."""
    actor(EXP)[0].sum().backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        actor(EXP)[0].sum().backward()
    held = peak = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("mode", MODES, ids=IDS)
def test_the_peak_of_a_backward_pass(mode: bool | str) -> None:
    """With what is kept, a layer computed again and the largest gradient of an activation; never above the peak."""
    actor = actor_of("qwen2", torch.float32, mode, False)
    found, expected = peak_bytes(actor), estimate(actor, torch.float32, mode, False)
    assert 0.85 * found <= expected.backward <= found


class Allocated:
    """Bytes of the tensors on the fake device that exist at once, and the most of them so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors: list[weakref.ref[Tensor]] = []
        self.most, run = 0, tensor.execute

        def noted(*args: object) -> object:
            out = run(*args)
            found = tree_flatten(out)[0]
            self.tensors += [weakref.ref(one) for one in found if isinstance(one, tensor.CudaTensor)]
            self.most = max(self.most, self.now())
            return out

        monkeypatch.setattr(tensor, "execute", noted)

    def now(self) -> int:
        alive = [one for one in (each() for each in self.tensors) if one is not None]
        self.tensors = [weakref.ref(one) for one in alive]
        storages = [one.untyped_storage() for one in alive]
        return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_gradient_of_a_head(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a head in bfloat16 has the sum in float32 beside the result."""
    monkeypatch.setattr(logprobs, "_BLOCK", 256)  # rows of products that are added at once: few of a real vocabulary
    shape = ModelShape(1, 64, 64, 64, 64, 1, vocabulary=8192)
    with fake_cuda():
        allocated = Allocated(monkeypatch)
        hidden, weight = (torch.randn(rows, 64, device="cuda", dtype=dtype, requires_grad=True) for rows in (32, 8192))
        targets = torch.randint(8192, (32, ), device="cuda")
        loss = logprobs.chunked_logprobs(hidden, weight, targets, chunk_mib=0.1)[0].sum()
        before = allocated.now()
        loss.backward()
        expected = shape.head_gradient(dtype.itemsize)
        assert expected <= allocated.most - before <= 1.15 * expected


def test_shapes_of_other_configs() -> None:
    """Experts of a token count together; a config without the usual names has no estimate."""
    moe = AutoConfig.for_model("qwen3_moe", hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
                               num_hidden_layers=3, moe_intermediate_size=5, num_experts_per_tok=2)
    assert ModelShape.of(moe) == ModelShape(3, 8, 10, 8, 4, 2, vocabulary=151936, head_norms=True,
                                            mixture=Mixture(2, dense=6144))  # yapf: disable
    moe.mlp_only_layers = [1]
    assert ModelShape.of(moe).all_kinds == (LayerKind(2), LayerKind(1, dense=True))  # type: ignore
    assert ModelShape.of(AutoConfig.for_model("gpt2")) is None


def test_shapes_of_layers_with_state() -> None:
    """They have no keys and see no window; the MLPs of some are layers of their own, and some attend beside it."""
    kinds = {
        family: ModelShape.of(tiny.config(family)).kinds
        for family in ("qwen3_5", "bamba", "falcon_h1", "nemotron_h", "zamba2")
    }  # type: ignore
    assert kinds["qwen3_5"] == kinds["bamba"] == (LayerKind(1, attends=False, state=True), LayerKind(1))
    assert kinds["falcon_h1"] == (LayerKind(2, state=True), )
    assert kinds["zamba2"] == (LayerKind(1, attends=False, state=True, mlp=False), LayerKind(2, state=True))
    assert kinds["nemotron_h"] == (LayerKind(1, attends=False, state=True, mlp=False), LayerKind(1, attends=False),
                                   LayerKind(1, mlp=False))  # yapf: disable
    shapes = [ModelShape.of(tiny.config(family)) for family in ("qwen3_5", "qwen3")]
    assert [shape.windows for shape in shapes if shape] == [0, 0]
    assert [shape.kv_bytes(2) for shape in shapes if shape] == [2 * 16 * 2, 2 * 2 * 16 * 2]
