"""Models whose layers keep a state, in vLLM: which of them it computes as the trainer does, and where."""
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn, Tensor
from torch.nn.functional import softplus
from transformers import PretrainedConfig

from lightrft.models.stateful import stateful
from lightrft.utils.errors import UserError

_IN_BFLOAT16 = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # on a CPU: vLLM's kernels there are of bfloat16
_IN_FLOAT32 = ("falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h")  # and in bfloat16
Limits = tuple[float, float]
_NO_LIMITS: Limits = (0.0, math.inf)
_LIMITS: ContextVar[Limits | None] = ContextVar("limits of the time steps of the layer that runs", default=None)
_NO_CODE, _ON_GPUS = "vLLM has no code of its own for it", "vLLM has kernels for it on GPUs alone"
_NEVER = "its log-probs there were never compared with those of the trainer"
_ON_CPUS_ALONE = "its limited time steps were compared on CPUs alone"
REFUSED = {"bamba": _NO_CODE, "minimax": _NO_CODE}
ON_CPUS = {"jamba": _ON_GPUS, "kimi_linear": _ON_GPUS, "olmo_hybrid": _ON_GPUS}


def state_arguments(config: PretrainedConfig, cuda: bool, bf16: bool) -> dict[str, Any]:
    """Arguments of a model that has layers with state.

    States of prefixes are stored between the chunks of prompts, which are never cut here.

    Raises:
        UserError: vLLM cannot compute them on this device, computes them otherwise, or nobody has compared them.
    """
    family = config.get_text_config().model_type.removesuffix("_text")
    text = config.get_text_config()
    mixes = family == "nemotron_h" and "moe" in text.layer_types
    compared = family in _IN_BFLOAT16 or family in _IN_FLOAT32 and not mixes
    limits = tuple(getattr(text, "time_step_limit", None) or _NO_LIMITS)
    if not compared or cuda and (family == "nemotron_h" or limits != _NO_LIMITS):
        reason = _ON_CPUS_ALONE if compared else (REFUSED if cuda else REFUSED | ON_CPUS).get(family, _NEVER)
        raise UserError(f"--engine_type vllm: model type {family!r} has layers with state, and {reason}. Use "
                        "--engine_type hf")
    if not cuda and not bf16 and family in _IN_BFLOAT16:
        raise UserError(f"--engine_type vllm: vLLM computes layers with state of model type {family!r} on a CPU in "
                        "bfloat16 alone: add --bf16, or use --engine_type hf")
    arguments = {"enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32"}  # as transformers stores them
    if family == "lfm2":  # vLLM asks for its widths twice; transformers reads the hidden size alone
        arguments["hf_overrides"] = {"conv_dim": config.hidden_size, "block_dim": config.hidden_size}
    return arguments


def _decay(log: Tensor) -> Tensor:
    return -torch.exp(log.float())


def stored_forms(model: nn.Module, names: Mapping[str, Any]) -> dict[str, Callable[[Tensor], Tensor]]:
    """Functions of weights that vLLM stores in their place, by HF name: layers of Mamba 2 store the decay."""
    decays = any(name.endswith(".A") for name, _ in model.named_parameters())
    return {name: _decay for name in names if decays and name.endswith(".A_log")}


def limit_time_steps(model: nn.Module, hf: nn.Module) -> None:
    """Let the layers of Mamba 2 of ``model``, vLLM's, keep their time steps in the limits of those of ``hf``, the
    trainer's. vLLM itself limits none."""
    found: list[Any] = [getattr(layer, "time_step_limit", None) for layer in stateful(hf)]
    for limit in {tuple(limits) for limits in found if limits} - {_NO_LIMITS}:
        from vllm.model_executor.layers.mamba import mamba_mixer2
        _take_limits(mamba_mixer2)
        for layer in model.modules():
            if isinstance(layer, mamba_mixer2.MambaMixer2):
                vars(layer)["conv_ssm_forward"] = partial(_within, limit, layer.conv_ssm_forward)


def _within(limits: Limits, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer whose time steps have ``limits``."""
    token = _LIMITS.set(limits)
    try:
        return forward(*args, **kwargs)
    finally:
        _LIMITS.reset(token)


@lru_cache(maxsize=None)
def _take_limits(module: Any) -> None:
    """Let vLLM's kernels of Mamba 2, for sequences and for one token, have the limits of the layer that runs."""
    scan, step = module.mamba_chunk_scan_combined_varlen, module.selective_state_update

    def limited_scan(*args: Any, **kwargs: Any) -> Any:
        return scan(*args, **kwargs | {"dt_limit": _LIMITS.get() or kwargs["dt_limit"]})

    def limited_step(state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, bias: Tensor,
                     **kwargs: Any) -> Any:
        if limits := _LIMITS.get():  # dt and bias [..., heads, dim] are the same along dim
            dt = softplus((dt + bias)[..., :1].float()).clamp(*limits).to(dt.dtype).expand_as(dt)
            bias, kwargs = bias.new_zeros(bias.shape[0], 1).expand_as(bias), kwargs | {"dt_softplus": False}
        return step(state, x, dt, a, b, c, d, bias, **kwargs)

    module.mamba_chunk_scan_combined_varlen, module.selective_state_update = limited_scan, limited_step
