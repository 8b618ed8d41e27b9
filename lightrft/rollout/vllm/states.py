"""Models whose layers keep a state, in vLLM: which of them it computes as the trainer does, and where."""
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn, Tensor
from transformers import PretrainedConfig

from lightrft.utils.errors import UserError

_IN_BFLOAT16 = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # on a CPU: vLLM's kernels there are of bfloat16
_IN_FLOAT32 = ("falcon_h1", "granitemoehybrid", "lfm2")  # and in bfloat16
_NO_LIMITS = (0.0, math.inf)
_NO_CODE, _ON_GPUS = "vLLM has no code of its own for it", "vLLM has kernels for it on GPUs alone"
_NEVER = "its log-probs there were never compared with those of the trainer"
REFUSED = {
    "bamba": _NO_CODE, "minimax": _NO_CODE, "nemotron_h": "vLLM does not raise small time steps to time_step_min",
}  # yapf: disable
ON_CPUS = {
    "jamba": _ON_GPUS, "kimi_linear": _ON_GPUS, "olmo_hybrid": _ON_GPUS,
}  # yapf: disable


def state_arguments(config: PretrainedConfig, cuda: bool, bf16: bool) -> dict[str, Any]:
    """Arguments of a model that has layers with state.

    States of prefixes are stored between the chunks of prompts, which are never cut here.

    Raises:
        UserError: vLLM cannot compute them on this device, computes them otherwise, or nobody has compared them.
    """
    family = config.get_text_config().model_type.removesuffix("_text")
    limits = tuple(getattr(config.get_text_config(), "time_step_limit", None) or _NO_LIMITS)
    compared = family in _IN_BFLOAT16 or family in _IN_FLOAT32
    if not compared or limits != _NO_LIMITS:
        reason = (REFUSED if cuda else REFUSED | ON_CPUS).get(family, _NEVER)
        if compared:
            reason = f"vLLM does not keep their time steps in time_step_limit {limits}"
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
