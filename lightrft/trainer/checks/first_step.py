"""Checks of the first step: engine, trainer and reference agree, or the numbers that follow mean nothing."""
from torch import Tensor

from lightrft.config.forward_passes import bypasses
from lightrft.config.schema import Config
from lightrft.ops.mismatch import mismatch_metrics, mismatch_sums
from lightrft.ops.packing import shift_right
from lightrft.trainer.logprob_pass import on_update_packs
from lightrft.trainer.metric_sums import MetricSums
from lightrft.types import Experience
from lightrft.utils.errors import ExpectedError
from lightrft.utils.logging import get_logger

# Engine and trainer, nats (mean) and probability (largest): float32 on CPUs, float32 on GPUs (kernels may multiply in
# TF32), bfloat16. The mean is what stale weights move; the largest gap is a rounding of one token: two exact float32
# evaluations of a sharp model were measured to differ by up to 1.1e-5 on CPUs.
ENGINE = {"abs_logp_mean": (1e-5, 1e-3, 0.05), "abs_dp_max": (1e-4, 1e-2, 0.5)}
PASSES = (1e-3, 0.5)  # two passes of the trainer, ratio and nats (largest over tokens): float32, bfloat16


class StepFactError(ExpectedError, RuntimeError):
    """Engine, trainer or reference disagree before anything was learned."""


def limits(bf16: bool, device: str, same_rows: bool) -> dict[str, float]:
    """The largest gaps that rounding explains: those of :data:`ENGINE`, and ``passes``, of two passes of the trainer.

    Args:
        device: its type. CPUs repeat a computation to the bit; of GPU kernels that is not asked.
        same_rows: both passes forward the same packs, and the same rows of them through the head. A matmul of other
            rows, and attention of other packs, round in another way.
    """
    kind = 2 if bf16 else int(device != "cpu")
    passes = 0.0 if same_rows and device == "cpu" else PASSES[bf16]
    return {key: values[kind] for key, values in ENGINE.items()} | {"passes": passes}


def facts_are_measured(metrics: dict[str, float]) -> bool:
    """Whether the policy was trained on something that the facts can be checked on."""
    return bool(
        metrics.get("policy/optimizer_steps", 0) and metrics["policy/trained_tokens"]
        and metrics.get("rollout/same_policy/tokens", 1))


def check_step_facts(metrics: dict[str, float], config: Config, fresh: bool, device: str) -> None:
    """Check the first step in which a process trains the policy, on a ``device`` of that type, within :func:`limits`.

    Engine and trainer agree on the tokens that were sampled as they are trained (:class:`SamePolicy`); the ratio of the
    first optimizer step is 1 (not with dropout); in a ``fresh`` run with a reference the KL to it is 0 as well. Old
    log-probs and update forward the same packs unless samples were dropped in between, or the options say so.

    Raises:
        StepFactError: naming the number, its limit and what to look at.
    """
    same_rows = on_update_packs(config) and not metrics.get("rollout/dropped_samples", 0)
    limit = limits(config.model.bf16, device, same_rows)
    dropout = config.model.lora_dropout > 0  # the update then sees other numbers than the passes before it
    full_support = config.rollout.top_p == 1 and not config.rollout.top_k and not config.rollout.min_p
    facts = []
    if not dropout and not bypasses(config):  # else the ratio is the mismatch
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
    """Measures the mismatch of the tokens that the weights of this step sampled at the temperature of training.

    That is every token, and ``rollout/mismatch/*`` says it already, but for three options. Dynamic sampling and
    oversampling carry over tokens of older weights; FIRE draws first tokens at a temperature of their own. Those really
    differ.
    """

    def __init__(self, config: Config) -> None:
        self.fire = config.rollout.use_fire
        carries = config.rollout.dynamic_sampling or config.rollout.oversample > 1
        self.apart = self.fire or carries  # whether some tokens are not of this kind
        self.version = 0  # of the weights that generate the rollout of this step

    def mask(self, exp: Experience) -> Tensor:
        """bool [T]: those tokens."""
        mask = exp.loss_mask & (exp.weight_versions == self.version)
        return mask & shift_right(exp.loss_mask, exp.cu_seqlens) if self.fire else mask

    def add(self, sums: MetricSums, exp: Experience) -> None:
        """Count a micro-batch whose old log-probs are known."""
        if self.apart:
            totals, peaks = mismatch_sums(exp.old_logprobs, exp.rollout_logprobs, self.mask(exp))
            sums.add_vector(_SUMS, totals)
            sums.peak(_PEAKS, peaks)

    def metrics(self, sums: MetricSums) -> dict[str, float]:
        """The number of these tokens, and what the step facts look at."""
        if not self.apart:
            return {}
        found = mismatch_metrics(sums.vector(_SUMS), sums.vector(_PEAKS))
        return {
            "rollout/same_policy/tokens": sums.vector(_SUMS)[0].item(),
            "rollout/same_policy/abs_logp_mean": found["abs_logp_mean"],
            "rollout/same_policy/abs_dp_max": found["abs_dp_max"],
        }
