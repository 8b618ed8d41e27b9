"""Engine against trainer on the tokens where both must give the same numbers."""
from torch import Tensor

from lightrft.config.schema import Config
from lightrft.ops.mismatch import mismatch_metrics, mismatch_sums
from lightrft.ops.packing import shift_right
from lightrft.trainer.metric_sums import MetricSums
from lightrft.types import Experience

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
