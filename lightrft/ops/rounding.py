"""Gaps that rounding explains, between two evaluations of the log-probs of one model on the same tokens.

On CPUs in float32 hardly any is left, and every token must agree. Elsewhere single tokens differ by much, while faults
move many: there the limits are on means and on 99.9 % quantiles.
"""
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import torch
from torch import nn

from lightrft.config.schema import RolloutConfig


class Band(NamedTuple):
    """Largest gaps that rounding explains."""
    mean: float  # of |log p - log q|, or |ratio - 1| of two passes
    dp: float  # of |p - q|: 99.9 % of the tokens
    gap: float  # of the gaps of two passes: 99.9 % of the tokens


# Reported for bfloat16 at the first step: mean |p - q| 2e-3 to 1e-2 and max 0.37 to 0.61 of dense models; mean
# |log p - log q| 0.064 of a mixture of experts, where the router turns rounding into other experts. Tiny models show
# how means and quantiles relate, and that TF32 rounds a tenth as much or less.
BANDS = {
    "float32": Band(1e-4, 1e-3, 1e-3), "tf32": Band(5e-3, 0.05, 0.1), "bf16": Band(0.1, 0.4, 1.0),
    "fp8": Band(0.2, 0.7, inf)  # only of engines
}  # yapf: disable
EXPERTS = BANDS | {"float32": Band(4e-4, 0.01, 0.1), "tf32": Band(0.02, 0.15, 1.0), "bf16": Band(0.2, 0.7, 3.0)}
# float32 on CPUs: mean |log p - log q| and the largest |p - q|, where two exact evaluations of a sharp model differed
# by up to 1.1e-5 in a measurement; the largest gap of two passes over other packs.
CPU_ENGINE, CPU_PASSES = {"abs_logp_mean": 1e-5, "abs_dp_max": 1e-4}, {"": 1e-3}
CPU_CANARY = (1e-3, 1e-4)


@dataclass(frozen=True)
class Arithmetic:
    """The coarser arithmetic of two evaluations of one model.

    Attributes:
        device: type of the device.
        kind: key of :data:`BANDS`.
        experts: the model is a mixture of experts.
    """
    device: str
    kind: str
    experts: bool = False

    @property
    def exact(self) -> bool:
        """True if rounding is too small to single out a token."""
        return self.device == "cpu" and self.kind == "float32"

    @property
    def band(self) -> Band:
        """The limits where rounding singles out tokens."""
        return (EXPERTS if self.experts else BANDS)[self.kind]

    def engine_limits(self) -> dict[str, float]:
        """Return the limits of engine and trainer by the last part of their metrics."""
        return CPU_ENGINE if self.exact else {"abs_logp_mean": self.band.mean, "abs_dp_p999": self.band.dp}

    def pass_limits(self, same_rows: bool) -> dict[str, float]:
        """Return the limits of two passes of the trainer by the ending of their metrics; "" is the largest gap.

        ``same_rows``: both passes forward the same packs, and the same rows of them through the head. A matmul of other
        rows, and attention over other packs, round differently. CPUs repeat a computation to the bit, in any dtype; GPU
        kernels need not.
        """
        if same_rows and self.device == "cpu":
            return {"": 0.0}
        return CPU_PASSES if self.exact else {"_mean": self.band.mean, "_p999": self.band.gap}

    def canary_limits(self) -> tuple[float, float]:
        """Return limits of mean |log p - log q| over a few tokens: that of the first measurement, and the least of
        later ones. The mean of few tokens varies more than that of many."""
        return CPU_CANARY if self.exact else (max(4 * self.band.mean, 1e-3), self.band.mean)


class RunArithmetic(NamedTuple):
    """Arithmetic of two passes of the trainer, and of engine and trainer."""
    passes: Arithmetic
    engine: Arithmetic

    @classmethod
    def of(cls, cfg: RolloutConfig, bf16: bool, device: str, experts: bool) -> "RunArithmetic":
        """Return the arithmetic of a run on this type of device. GPUs multiply float32 in TF32 if torch is set to;
        the attention kernels of vLLM and SGLang always do."""
        tf32 = device != "cpu" and torch.get_float32_matmul_precision() != "highest"
        passes = Arithmetic(device, "bf16" if bf16 else "tf32" if tf32 else "float32", experts)
        rounds = passes.kind == "float32" and device != "cpu" and cfg.caps.rounds_float32
        coarser = cfg.engine_quantization if cfg.engine_quantization != "none" else "tf32" if rounds else passes.kind
        return cls(passes, replace(passes, kind=coarser))


def has_experts(model: nn.Module) -> bool:
    """Return True if ``model`` is a mixture of experts."""
    return any(name.endswith("experts") or "Experts" in type(module).__name__ for name, module in model.named_modules())
