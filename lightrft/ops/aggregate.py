"""Aggregation of token losses to one number, with denominators of the whole mini-batch.

A mini-batch is cut into micro-batches, ranks and packs. Each cut aggregates its own tokens over the *global*
denominators, so the plain sum over all cuts is the loss and the gradient does not depend on how the batch was cut.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrft.ops.segment import segment_mean, segment_sum

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")


@dataclass(frozen=True)
class Denominators:
    """Counts of one optimizer step over all ranks and micro-batches; a count of 0 divides by 1."""
    tokens: float  # kept tokens
    seqs: float  # sequences with at least one kept token, or all of them
    norm: float = 1.0  # the constant of seq-mean-token-sum-norm, in tokens

    @classmethod
    def of(cls, counts: Tensor, norm: float = 1.0) -> "Denominators":
        """Build from the (reduced) result of :func:`count`; one device sync."""
        tokens, seqs = counts.tolist()
        return cls(tokens, seqs, norm)


def count(mask: Tensor, cu_seqlens: Tensor, all_seqs: bool = False) -> Tensor:
    """``[mask.sum(), sum(mask_b.any())]``: float64 [2], to be summed over micro-batches and ranks.

    With ``all_seqs`` the second number is the number of sequences, B.
    """
    per_seq = segment_sum(mask, cu_seqlens)
    return torch.stack([per_seq.sum(), ((per_seq > 0) | all_seqs).sum()]).double()


def aggregate(loss: Tensor, mask: Tensor, cu_seqlens: Tensor, mode: str, denominators: Denominators,
              norm_seqs: bool = True) -> Tensor:
    """Return this cut's share of the loss, a scalar; 0 with a zero gradient where nothing is kept.

    With ``l_b = loss_b[mask_b]``, N the kept tokens and S the sequences that keep any, of the whole mini-batch:
    token-mean ``sum(l) / N``; seq-mean-token-mean ``sum_b(l_b.mean()) / S``; seq-mean-token-sum
    ``sum_b(l_b.sum()) / S``; seq-mean-token-sum-norm ``sum_b(l_b.sum() / norm) / S``, the constant of Dr.GRPO
    (arXiv:2503.20783); token-sum ``sum(l)``, whose gradient grows with the batch.

    Args:
        loss: [T]; what the mask leaves out may be NaN or inf.
        mask: [T] bool, True = keep.
        cu_seqlens: [B + 1]; a sequence is never cut.
        mode: one of :data:`MODES`.
        denominators: global counts.
        norm_seqs: False leaves the S out of seq-mean-token-sum-norm.
    """
    kept, seqs = torch.where(mask, loss, 0), max(denominators.seqs, 1.0)
    if mode == "token-mean":
        return kept.sum() / max(denominators.tokens, 1.0)
    if mode == "token-sum":
        return kept.sum()
    if mode == "seq-mean-token-mean":
        return segment_mean(kept, cu_seqlens, mask).sum() / seqs
    if mode == "seq-mean-token-sum":
        return kept.sum() / seqs
    if mode == "seq-mean-token-sum-norm":
        return kept.sum() / (denominators.norm * (seqs if norm_seqs else 1.0))
    raise ValueError(f"unknown loss_agg_mode {mode!r}; known: {', '.join(MODES)}")
