"""Returns and advantages over the action tokens of packed sequences; tokens between turns are not time steps."""
import torch
from torch import Tensor

from lightrft.ops.segment import seq_ids


def _reverse_scan(x: Tensor, decay: Tensor) -> Tensor:
    """``for k in reversed(range(K - 1)): x[k] += decay[k] * x[k + 1]`` by doubling; decay is 0 where a segment ends.

    After a round, ``x[k]`` covers twice as many steps and ``decay[k]`` is the factor of the first step not covered.
    """
    x, decay, step = x.clone(), decay.clone(), 1
    while step < len(x) and bool(decay.any()):
        x[:-step] += decay[:-step] * x[step:]
        decay[:-step] *= decay[step:].clone()
        step *= 2
    return x


def _actions(mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the action tokens [K], and whether the next one belongs to the same sequence [K]."""
    index = mask.nonzero().squeeze(-1)
    owner = seq_ids(cu_seqlens, len(mask))[index]
    follows = torch.zeros_like(owner, dtype=torch.bool)
    follows[:-1] = owner[:-1] == owner[1:]
    return index, follows


def _scatter(values: Tensor, index: Tensor, total: int) -> Tensor:
    return values.new_zeros(total).index_copy(0, index, values)


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """``for t in reversed(actions_b): R = rewards[t] + gamma * R; out[t] = R``: [T], 0 outside the mask.

    Rewards outside the mask are ignored, and one step is one action token however long the gap between them.
    """
    index, follows = _actions(mask, cu_seqlens)
    picked = rewards[index]
    return _scatter(_reverse_scan(picked, gamma * follows.to(picked.dtype)), index, len(mask))


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float,
        lambd: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) over action tokens only; [T], 0 outside the mask.

    Equals, for each sequence, with ``A = V = 0`` after its last action token:
    ``for t in reversed(actions_b): A = rewards[t] + gamma * (V + lambd * A) - values[t]; V = values[t]; out[t] = A``.

    Returns:
        ``(advantages, returns)`` with ``returns = advantages + values``, the target of the critic.
    """
    index, follows = _actions(mask, cu_seqlens)
    value, more = values[index], follows.to(values.dtype)
    following = torch.zeros_like(value)
    following[:-1] = value[1:]
    delta = rewards[index] + gamma * more * following - value
    advantage = _reverse_scan(delta, gamma * lambd * more)
    return _scatter(advantage, index, len(mask)), _scatter(advantage + value, index, len(mask))
