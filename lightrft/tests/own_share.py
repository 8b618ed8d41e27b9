"""A plugin with a mistake of the trainer: each rank divides by the counts of its own samples."""
import torch

from lightrft.ops.aggregate import Denominators
from lightrft.trainer.replay_buffer import MiniBatch


def own_share(self: MiniBatch, kept: torch.Tensor, norm: float, all_seqs: bool = False) -> Denominators:
    """:meth:`MiniBatch.denominators` of this rank alone."""
    counts = kept[[i for part in self.micro_batches for i in part]]
    return Denominators(counts.sum().item(), ((counts > 0) | all_seqs).sum().item(), norm)


MiniBatch.denominators = own_share
