"""Engine against trainer on the tokens where both must give the same numbers."""
from torch import Tensor

from lightrft.config.schema import Config
from lightrft.ops.mismatch import mismatch_metrics, mismatch_sums
from lightrft.ops.segment import expand
from lightrft.trainer.metric_sums import MetricSums
from lightrft.types import Experience

NAME = "rollout/same_policy"


class SamePolicy:
    """Measures the mismatch of tokens that the engine sampled with the weights of this step.

    Without dynamic sampling that is every token, and ``rollout/mismatch/*`` says it already; with it, groups that were
    carried over come from older weights and really differ.
    """

    def __init__(self, config: Config) -> None:
        self.apart = config.rollout.dynamic_sampling  # whether some tokens are not of this kind
        self.version = 0  # of the weights that generated the rollout of this step

    def mask(self, exp: Experience) -> Tensor:
        """bool [T]: those tokens."""
        return exp.loss_mask & expand(exp.weight_version == self.version, exp.cu_seqlens, exp.num_tokens)

    def add(self, sums: MetricSums, exp: Experience) -> None:
        """Count a micro-batch whose old log-probs are known."""
        if self.apart:
            totals, peaks = mismatch_sums(exp.old_logprobs, exp.rollout_logprobs, self.mask(exp))
            sums.add_vector(NAME, totals)
            sums.peak(f"{NAME}/peaks", peaks)

    def metrics(self, sums: MetricSums) -> dict[str, float]:
        """``rollout/same_policy/{tokens,abs_logp_mean,abs_dp_max}``."""
        if not self.apart:
            return {}
        totals = sums.vector(NAME)
        found = mismatch_metrics(totals, sums.vector(f"{NAME}/peaks"))
        return {
            f"{NAME}/tokens": totals[0].item(),
            **{f"{NAME}/{key}": found[key] for key in ("abs_logp_mean", "abs_dp_max")}
        }
