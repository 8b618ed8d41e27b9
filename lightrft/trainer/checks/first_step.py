"""Checks of the first step: engine, trainer and reference must agree, or all later numbers are meaningless."""
import math
from typing import NamedTuple

from torch import Tensor

from lightrft.config.schema import Config
from lightrft.ops.divergence import gap_metrics, gap_sums, mismatch_metrics, mismatch_sums
from lightrft.ops.rounding import RunArithmetic
from lightrft.ops.segment import shift_right
from lightrft.trainer.logprob_pass import on_update_packs
from lightrft.trainer.metric_sums import MetricSums
from lightrft.types import Experience
from lightrft.utils.errors import ExpectedError
from lightrft.utils.logging import get_logger

FIRST_RATIO, FIRST_KL = "policy/first_ratio_gap", "policy/first_kl_ref"
WARNS = ("fp8", )  # the gap is the price of the option, and no bound of it is known: a warning, not an error


class StepFactError(ExpectedError, RuntimeError):
    """Engine, trainer and reference disagree before the first update."""


def facts_are_measured(metrics: dict[str, float]) -> bool:
    """Return True if the policy was trained on tokens for which the facts can be checked."""
    return bool(
        metrics.get("policy/optimizer_steps", 0) and metrics["policy/trained_tokens"]
        and metrics.get("rollout/same_policy/tokens", 1))


class Fact(NamedTuple):
    """Metric that must not exceed ``most``."""
    key: str
    most: float
    meaning: str  # of a larger number
    stops: bool = True


def step_facts(config: Config, fresh: bool, arithmetic: RunArithmetic, dropped: bool) -> list[Fact]:
    """Return the facts that must hold in the first step in which a process trains the policy.

    Engine and trainer agree on the tokens of the policy in training (:class:`SamePolicy`). The ratio of the first
    optimizer step is 1 (not with dropout). In a ``fresh`` run with a reference the KL to it is 0 as well. The old
    log-probs and the update forward the same packs unless samples were ``dropped`` in between or the options differ.
    """
    engine = arithmetic.engine
    passes = arithmetic.passes.pass_limits(on_update_packs(config) and not dropped)
    dropout = config.model.lora_dropout > 0  # the update then computes other numbers than the passes before it
    full_support = config.rollout.top_p == 1 and not config.rollout.top_k and not config.rollout.min_p
    facts = []
    if not dropout and not config.bypasses:  # else the ratio is the mismatch
        meaning = "the old log-probs and the update see different numbers"
        facts += [Fact(FIRST_RATIO + end, most, meaning) for end, most in passes.items()]
    if full_support and not dropout:
        measured = "same_policy" if SamePolicy(config).apart else "mismatch"
        meaning = "the engine does not sample from the weights that are trained"
        facts += [Fact(f"rollout/{measured}/{key}", most, meaning, engine.kind not in WARNS)
                  for key, most in engine.engine_limits().items()]  # yapf: disable
    if fresh and config.algorithm.init_kl_coef > 0 and config.model.ref_pretrain in (None, config.model.pretrain):
        meaning = "the reference is not the model that training starts from"
        facts += [Fact(FIRST_KL + end, most, meaning) for end, most in passes.items()]
    return facts


def check_step_facts(metrics: dict[str, float], config: Config, fresh: bool, arithmetic: RunArithmetic) -> None:
    """Check :func:`step_facts` on the metrics of a step.

    Raises:
        StepFactError: names the number, its limit and the likely cause.
    """
    facts = step_facts(config, fresh, arithmetic, bool(metrics.get("rollout/dropped_samples", 0)))
    unknown = [fact.key for fact in facts if fact.key not in metrics]
    if unknown:
        raise StepFactError(f"step 1: {', '.join(unknown)}: not measured")
    exceeded = [fact for fact in facts if not metrics[fact.key] <= fact.most]
    for key, most, meaning, stops in exceeded:
        message = f"step 1: {key} is {metrics[key]:.3g}, not within {most:g}: {meaning}"
        if stops or not math.isfinite(metrics[key]):
            raise StepFactError(message)
        get_logger().warning(f"{message}, or this is rounding of the quantized engine (compare with "
                             "--engine_quantization none)")
    hold = [f"{fact.key} {metrics[fact.key]:.3g}" for fact in facts if fact not in exceeded]
    get_logger().info(f"step-1 facts hold: {', '.join(hold)}")


def add_gaps(sums: MetricSums, key: str, gaps: Tensor, mask: Tensor) -> None:
    """Add the gaps [T] of a micro-batch between two passes of the trainer."""
    totals, peak = gap_sums(gaps.detach().abs(), mask)
    sums.add_vector(f"{key} sums", totals)
    sums.peak(key, peak)


def pass_metrics(sums: MetricSums) -> dict[str, float]:
    """Return the mean and the high quantile of the gaps of passes; :class:`MetricSums` reports the largest itself."""
    return {f"{key}_{name}": value for key in (FIRST_RATIO, FIRST_KL) if key in sums.peaks()
            for name, value in gap_metrics(sums.vector(f"{key} sums")).items()}  # yapf: disable


_SUMS, _PEAKS = "same policy", "same policy, peaks"


class SamePolicy:
    """Measures the mismatch of the on-policy tokens: sampled by the weights of this step at the training temperature.

    Without three options that is every token, and ``rollout/mismatch/*`` reports it already. Dynamic sampling and
    oversampling carry over tokens of older weights; FIRE draws first tokens at a separate temperature. The mismatch of
    these tokens is real.
    """

    def __init__(self, config: Config) -> None:
        self.fire = config.rollout.use_fire
        carries = config.rollout.dynamic_sampling or config.rollout.oversample > 1
        self.apart = self.fire or carries  # True if some tokens are off-policy
        self.version = 0  # version of the weights that generate the rollout of this step

    def mask(self, exp: Experience) -> Tensor:
        """bool [T]: the on-policy tokens."""
        mask = exp.loss_mask & (exp.weight_versions == self.version)
        return mask & shift_right(exp.loss_mask, exp.cu_seqlens) if self.fire else mask

    def add(self, sums: MetricSums, exp: Experience) -> None:
        """Add a micro-batch whose old log-probs are known."""
        if self.apart:
            totals, peaks = mismatch_sums(exp.old_logprobs, exp.rollout_logprobs, self.mask(exp))
            sums.add_vector(_SUMS, totals)
            sums.peak(_PEAKS, peaks)

    def metrics(self, sums: MetricSums) -> dict[str, float]:
        """Return the number of on-policy tokens, and the gaps that the step facts check."""
        if not self.apart:
            return {}
        found = mismatch_metrics(sums.vector(_SUMS), sums.vector(_PEAKS))
        return {
            "rollout/same_policy/tokens": sums.vector(_SUMS)[0].item(),
            "rollout/same_policy/abs_logp_mean": found["abs_logp_mean"],
            "rollout/same_policy/abs_dp_p999": found["abs_dp_p999"],
            "rollout/same_policy/abs_dp_max": found["abs_dp_max"],
        }
