"""Checks of the first step: engine, trainer and reference must agree, or all later numbers are meaningless."""
from torch import Tensor

from lightrft.config.schema import Config
from lightrft.ops.divergence import mismatch_metrics, mismatch_sums
from lightrft.ops.segment import shift_right
from lightrft.trainer.logprob_pass import on_update_packs
from lightrft.trainer.metric_sums import MetricSums
from lightrft.types import Experience
from lightrft.utils.errors import ExpectedError
from lightrft.utils.logging import get_logger

# Gaps of engine and trainer, nats (mean) and probability (largest): float32 on CPUs, float32 on GPUs (kernels may
# multiply in TF32), bfloat16. Stale weights move the mean. The largest gap is the rounding of one token: two exact
# float32 evaluations of a sharp model differed by up to 1.1e-5 on CPUs in a measurement.
ENGINE = {"abs_logp_mean": (1e-5, 1e-3, 0.05), "abs_dp_max": (1e-4, 1e-2, 0.5)}
PASSES = (1e-3, 0.5)  # gap of two trainer passes, ratio and nats (largest over tokens): float32, bfloat16


class StepFactError(ExpectedError, RuntimeError):
    """Engine, trainer and reference disagree before the first update."""


def limits(bf16: bool, device: str, same_rows: bool) -> dict[str, float]:
    """Return the largest gaps that rounding explains: those of :data:`ENGINE`, and ``passes``, of two trainer passes.

    Args:
        device: type of the device. CPUs repeat a computation to the bit; GPU kernels need not.
        same_rows: both passes forward the same packs, and the same rows of them through the head. A matmul of other
            rows, and attention over other packs, round differently.
    """
    kind = 2 if bf16 else int(device != "cpu")
    passes = 0.0 if same_rows and device == "cpu" else PASSES[bf16]
    return {key: values[kind] for key, values in ENGINE.items()} | {"passes": passes}


def facts_are_measured(metrics: dict[str, float]) -> bool:
    """Return True if the policy was trained on tokens for which the facts can be checked."""
    return bool(
        metrics.get("policy/optimizer_steps", 0) and metrics["policy/trained_tokens"]
        and metrics.get("rollout/same_policy/tokens", 1))


def check_step_facts(metrics: dict[str, float], config: Config, fresh: bool, device: str) -> None:
    """Check the first step in which a process trains the policy, on a ``device`` type, within :func:`limits`.

    Engine and trainer agree on the tokens of the policy in training (:class:`SamePolicy`). The ratio of the first
    optimizer step is 1 (not with dropout). In a ``fresh`` run with a reference the KL to it is 0 as well. The old
    log-probs and the update forward the same packs unless samples were dropped in between or the options differ.

    Raises:
        StepFactError: names the number, its limit and the likely cause.
    """
    same_rows = on_update_packs(config) and not metrics.get("rollout/dropped_samples", 0)
    limit = limits(config.model.bf16, device, same_rows)
    dropout = config.model.lora_dropout > 0  # the update then computes other numbers than the passes before it
    full_support = config.rollout.top_p == 1 and not config.rollout.top_k and not config.rollout.min_p
    facts = []
    if not dropout and not config.bypasses:  # else the ratio is the mismatch
        facts += [("policy/first_ratio_gap", limit["passes"], "the old log-probs and the update see different numbers")]
    if full_support and not dropout:
        measured = "same_policy" if SamePolicy(config).apart else "mismatch"
        facts += [(f"rollout/{measured}/{key}", limit[key],
                   "the engine does not sample from the weights that are trained") for key in ENGINE]
    if fresh and config.algorithm.init_kl_coef > 0 and config.model.ref_pretrain in (None, config.model.pretrain):
        meaning = "the reference is not the model that training starts from"
        facts.append(("policy/first_kl_ref", limit["passes"], meaning))
    for key, most, meaning in facts:
        if key not in metrics:
            raise StepFactError(f"step 1: {key} was not measured")
        if not metrics[key] <= most:
            raise StepFactError(f"step 1: {key} is {metrics[key]:.3g}, not within {most:g}: {meaning}")
    get_logger().info("step-1 facts hold: " + ", ".join(f"{key} {metrics[key]:.3g}" for key, _, _ in facts))


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
            "rollout/same_policy/abs_dp_max": found["abs_dp_max"],
        }
