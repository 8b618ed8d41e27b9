"""Kernels against each other: attention over packed sequences, and log-probs from hidden states."""
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from logprob_memory import METHODS
from torch import Tensor

from benchmarks.gpu.catalog import ATTENTION, DECODE, LOGPROBS, OPERATIONS, Setting
from benchmarks.gpu.decode import decode_row
from benchmarks.gpu.models import shape
from benchmarks.gpu.store import Row, Tables
from benchmarks.gpu.timing import best, device_of, takes_triton
from lightrft.config.schema import ModelConfig
from lightrft.models import attention as packed
from lightrft.ops.logprobs import chunked_logprobs

MIB = 1 << 20
SIZES = ("0.5b", "7b", "3b")  # of models, whose heads differ
PASSES = 3.5  # FLOPs of forward and backward in those of forward: FlashAttention counts 2.5 for backward


def _flash(q: Tensor, k: Tensor, v: Tensor, layout: packed.PackedLayout) -> Tensor | None:
    kernel = packed.flash_kernel()
    cu, longest = layout.cu_seqlens, layout.max_len
    return None if kernel is None or not q.is_cuda else kernel(q, k, v, cu, cu, longest, longest, causal=True)


def _varlen(q: Tensor, k: Tensor, v: Tensor, layout: packed.PackedLayout) -> Tensor | None:
    return packed._attend_varlen(q, k, v, layout, None, None) if q.is_cuda else None


def _rows(q: Tensor, k: Tensor, v: Tensor, layout: packed.PackedLayout) -> Tensor | None:
    return packed._attend_rows(q, k, v, layout, None, None, None)


def _fused(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_mib: float) -> tuple[Tensor, Tensor | None]:
    return chunked_logprobs(hidden, weight, targets, chunk_mib=chunk_mib, fused=True)


WAYS = METHODS | {"fused": _fused}  # of log-probs; that of --fused_logprobs where there are CUDA and Triton
STEPS = ((32, 8, 128, 256), (8, 8, 4096, 2048))  # prompts, samples of each, tokens of prompts and of responses
CHECKED = 64  # tokens whose log-probs, entropies and gradients are compared with float64
KERNELS = {"flash-attn": _flash, "torch varlen": _varlen, "SDPA rows": _rows}


def _addmm(device: torch.device) -> Tensor:
    a, b = (torch.randn(64, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    return torch.addmm(torch.zeros(64, 64, device=device), a, b, out_dtype=torch.float32)


def _mm(device: torch.device) -> Tensor:
    a, b = (torch.randn(64, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    return torch.mm(a, b, out_dtype=torch.float32, out=torch.zeros(64, 64, device=device))


def _grouped_heads(device: torch.device) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn
    starts = torch.tensor([0, 64], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(64, heads, 64, device=device, dtype=torch.bfloat16) for heads in (14, 2, 2))
    return varlen_attn(q, k, v, starts, starts, 64, 64)


OPERATION = {"mm of bfloat16 into float32": _mm, "addmm of bfloat16 to float32": _addmm,
             "varlen_attn of grouped heads": _grouped_heads}  # yapf: disable


def outcome(run: Callable[[torch.device], Tensor], device: torch.device) -> str:
    """Return whether an operation runs on ``device``, which depends on the release of torch and on the device."""
    try:
        run(device).sum().item()
    except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}".replace("|", "/")
    return "runs"


def kernels(setting: Setting) -> Iterator[Tables]:
    """Compare the kernels for the heads of all sizes, and two lengths each."""
    sizes, device = [shape(replace(setting, size=size)) for size in SIZES], device_of(setting)
    layouts, counts = (((64, 4), (256, 1)), (16, 32)) if setting.reduced else (((2048, 8), (16384, 1)), (2048, 8192))
    yield {OPERATIONS: [{"operation": name, "outcome": outcome(run, device)} for name, run in OPERATION.items()]}
    attention, logprobs, decode = list[Row](), list[Row](), list[Row]()
    for model, layout in product(sizes, layouts):
        attention.append(attention_row(model, device, *layout))
        yield {ATTENTION: attention}
    for model, tokens, chunk_mib in product(sizes, counts, chunks(device)):
        logprobs.append(logprobs_row(model, device, tokens, chunk_mib))
        yield {LOGPROBS: logprobs}
    for model, case in product(sizes[:2], ((2, 2, 8, 8), ) if setting.reduced else STEPS):
        decode.append(decode_row(model, device, *case))
        yield {DECODE: decode}


def attention_row(sizes: dict[str, Any], device: torch.device, length: int, sequences: int) -> Row:
    """Time every kernel on ``sequences`` of ``length`` tokens; None where it cannot run."""
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    width = sizes["hidden_size"] // heads
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device) * length
    inputs = [torch.randn(length * sequences, h, width, device=device, dtype=torch.bfloat16, requires_grad=True)
              for h in (heads, kv_heads, kv_heads)]  # yapf: disable
    row: Row = {"heads": f"{heads} / {kv_heads} x {width}", "sequences": f"{sequences} x {length}"}
    flops = PASSES * 2.0 * length**2 * sequences * heads * width
    for name, kernel in KERNELS.items():
        layout = packed.PackedLayout.build(starts)
        seconds = attention_seconds(lambda: kernel(*inputs, layout), inputs, device)  # noqa: B023  (called here)
        row |= {f"{name}, ms": None if seconds is None else seconds * 1e3,
                f"{name}, TFLOP/s": None if seconds is None else flops / seconds / 1e12}  # yapf: disable
    return row


def attention_seconds(run: Callable[[], Tensor | None], inputs: list[Tensor], device: torch.device) -> float | None:
    """Return the seconds of forward and backward; None if this kernel is not there."""
    out = run()
    if out is None:
        return None
    grad = torch.randn_like(out)
    return best(lambda: torch.autograd.grad(run(), inputs, grad), device)


def chunks(device: torch.device) -> list[int]:
    """List the MiB of logits that are there at once: the least, and what a trainer takes on this device."""
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return sorted({256, ModelConfig().chunk_mib(total)})


def logprobs_row(sizes: dict[str, Any], device: torch.device, tokens: int, chunk_mib: int) -> Row:
    """Time all ways, read their peaks, and compare those of this library with float64."""
    hidden, vocab = sizes["hidden_size"], sizes["vocab_size"]
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, hidden, device=device, dtype=torch.bfloat16).mul_(hidden**-0.5).requires_grad_()
    targets = torch.randint(vocab, (tokens, ), device=device)
    row: Row = {"tokens": tokens, "hidden": hidden, "vocabulary": vocab, "chunk, MiB": chunk_mib}
    for name in WAYS if takes_triton(device) else METHODS:
        ms, mib = logprobs_cost(name, x, weight, targets, chunk_mib)
        row |= {f"{name}, ms": ms, f"{name}, MiB": mib}
        if name != "naive":
            row[f"{name}, error"] = logprobs_error(name, x[:CHECKED], weight, targets[:CHECKED], chunk_mib)
    return row


def logprobs_error(name: str, x: Tensor, weight: Tensor, targets: Tensor, chunk_mib: int) -> float:
    """Return the largest difference of log-probs, entropies (nats) and the gradient of the states (share of its
    largest number) from the naive way in float64."""
    found = []
    for way, states, head in ((WAYS[name], x, weight), (METHODS["naive"], x.double(), weight.double())):
        states, head = states.detach().requires_grad_(), head.detach()
        logprobs, entropy = way(states, head, targets, chunk_mib)
        grad, = torch.autograd.grad(logprobs.sum() + 0.1 * entropy.sum(), states)
        found.append((logprobs.double(), entropy.double(), grad.double()))
    scales = (1, 1, found[1][2].abs().max())
    return max(((a - b).abs().max() / scale).item() for a, b, scale in zip(*found, scales))


def logprobs_cost(name: str, x: Tensor, weight: Tensor, targets: Tensor,
                  chunk_mib: int) -> tuple[float | str, float | None]:
    """Return milliseconds, and MiB above the inputs (None on CPUs); what does not fit is a result too."""

    def run() -> None:
        found, entropy = WAYS[name](x, weight, targets, chunk_mib)
        torch.autograd.grad(found.sum() + 0.1 * entropy.sum(), (x, weight))

    before = 0
    if x.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    try:
        seconds = best(run, x.device)
    except torch.OutOfMemoryError:
        return "out of memory", None
    return seconds * 1e3, (torch.cuda.max_memory_allocated() - before) / MIB if x.is_cuda else None
