"""Divergences of a student from a teacher, per token, over the whole vocabulary or over the teacher's likeliest tokens.

Both sides are log-probs ``[N, V]``. A sparse teacher has ``k`` tokens per row and the mass of all others in one more
column: the divergence of the coarser distributions is a lower bound of the whole one, and never mistakes missing mass
for mass that the student should move.
"""
import math

import torch
from torch import Tensor

DIVERGENCES = ("forward", "reverse", "js")


def divergence(student: Tensor, teacher: Tensor, kind: str, mix: float = 0.5) -> Tensor:
    """Return the divergence of log-probs ``student`` and ``teacher`` [N, V]: [N] nats, 0 where they are equal.

    ``forward`` is KL(teacher || student), whose gradient is that of the cross-entropy against the teacher
    (arXiv:1503.02531); ``reverse`` KL(student || teacher) (arXiv:2306.08543); ``js`` the generalized Jensen-Shannon
    divergence ``mix * KL(teacher || m) + (1 - mix) * KL(student || m)``, ``m = mix * teacher + (1 - mix) * student``
    (arXiv:2306.13649, eq. 1).
    """
    if kind == "forward":
        return _kl(teacher, student)
    if kind == "reverse":
        return _kl(student, teacher)
    if kind == "js":
        mixture = torch.logaddexp(teacher + math.log(mix), student + math.log1p(-mix))
        return mix * _kl(teacher, mixture) + (1 - mix) * _kl(student, mixture)
    raise ValueError(f"unknown divergence {kind!r}; known: {', '.join(DIVERGENCES)}")


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """``sum(exp(p) * (p - q))`` of log-probs [N, V]; a token that p never has adds nothing."""
    gap = torch.where(p == -torch.inf, 0, p - q)
    return (p.exp() * gap).sum(-1)


def top_tokens(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Reduce log-probs [N, V] to the ids [N, k] of the ``k < V`` likeliest tokens and :func:`coarse` [N, k + 1]."""
    ids = logprobs.topk(k, dim=-1).indices
    return ids, coarse(logprobs, ids)


def coarse(logprobs: Tensor, ids: Tensor) -> Tensor:
    """``cat([logprobs[ids], log(1 - sum(exp(logprobs[ids])))])`` by row, [N, V] -> [N, k + 1], for ``k < V`` ids."""
    others = logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, ids), others], dim=-1)
