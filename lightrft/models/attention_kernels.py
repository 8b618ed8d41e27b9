"""Fused attention kernels of this installation, and what they can do on this device."""
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch

from lightrft.utils.errors import CaptureException
from lightrft.utils.logging import get_logger

_REFUSALS = (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError)  # of torch, also without CUDA


@lru_cache(maxsize=1)
def flash_kernel() -> Any:
    """``flash_attn_varlen_func``, or None when flash-attn is not installed, or cannot be imported (logged once).

    A spec is not enough: flash-attn-4 leaves a namespace package of that name, and a wheel may be for another torch or
    Triton, where it fails with whatever it meets first.
    """
    if importlib.util.find_spec("flash_attn") is None:
        return None
    with CaptureException() as broken:  # of any kind, such as a TypeError where Triton's autotune differs
        from flash_attn import flash_attn_varlen_func
    if broken.cause is not None:
        get_logger().warning(
            f"flash_attn cannot be used ({broken.cause}): attention on GPUs takes torch's varlen kernel")
        return None
    return flash_attn_varlen_func


@lru_cache(maxsize=1)
def varlen_kernel() -> tuple[Any, frozenset[str]]:
    """torch's ``varlen_attn`` and the names of its parameters, which differ between torch 2.10 and 2.13."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None, frozenset()
    from torch.nn.attention.varlen import varlen_attn
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def repeats_heads() -> bool:
    """Return True if attention in half precision on this GPU repeats the keys and values of grouped heads."""
    kernel, known = varlen_kernel()
    return kernel is not None and flash_kernel() is None and not takes_groups(kernel, known, "cuda")


@cache
def takes_groups(kernel: Callable[..., Any], known: frozenset[str], device: str) -> bool:
    """Return True if ``kernel``, torch's, attends to fewer heads of keys than of queries: by an option, or as it is.

    Some releases have no such option, and pass the heads on to a kernel that may take them. It is asked once, by a
    call whose result and gradients are compared with those of repeated heads.
    """
    if "enable_gqa" in known:
        return True
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    try:
        grouped, repeated = (_attended(kernel, causal, device, repeat) for repeat in (False, True))
    except _REFUSALS:
        return False
    return all(torch.allclose(a, b, atol=0.05, rtol=0.05) for a, b in zip(grouped, repeated, strict=True))


@torch.enable_grad()
def _attended(kernel: Callable[..., Any], causal: dict[str, Any], device: str, repeat: bool) -> list[torch.Tensor]:
    """Attend with four heads of queries to two of keys, over sequences of 16 and 24 tokens; return the result and the
    gradients, in float32."""
    inputs = []
    for number, heads in enumerate((4, 2, 2)):
        wave = torch.linspace(-2, 2, 40 * heads * 64).mul(50 + 7 * number).sin().view(40, heads, 64)
        inputs.append(wave.to(device, torch.bfloat16).requires_grad_())
    starts = torch.tensor([0, 16, 40], dtype=torch.int32).to(device)
    keys, values = (x.repeat_interleave(2, 1) if repeat else x for x in inputs[1:])
    out = kernel(inputs[0], keys, values, starts, starts, 24, 24, **causal)
    return [x.float() for x in (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))]
