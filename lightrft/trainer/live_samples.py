"""Which samples the update of the policy has to forward."""
import torch
from torch import Tensor

from lightrft.algorithms.base import POLICY_LOSSES
from lightrft.config.schema import Config
from lightrft.ops.segment import segment_sum
from lightrft.types import Experience


class LiveSamples:
    """All, or only those with an advantage, when the others would add exactly 0 to the gradient.

    They add more with a KL or an entropy bonus in the loss (whose adaptive weight needs the entropy of every sample),
    and with a policy loss that does something where the advantage is 0.
    """

    def __init__(self, config: Config) -> None:
        algorithm = config.algorithm
        regularised = algorithm.use_kl_loss or algorithm.entropy_coef or algorithm.entropy_target is not None
        entry = POLICY_LOSSES.get(algorithm.policy_loss)
        self.drops = config.train.drop_zero_advantage and entry.skips_zero and not regularised

    def __call__(self, exp: Experience) -> Tensor:
        """bool [B], the same on every rank."""
        if not self.drops:
            return torch.ones(exp.num_seqs, dtype=torch.bool)
        return segment_sum(exp.loss_mask & (exp.advantages != 0), exp.cu_seqlens) > 0
