"""Metrics of an update (sums over micro-batches and ranks) and of a rollout batch."""
from typing import Any

import torch
from torch import Tensor

from lightrft.ops.segment import moments
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.shards import Shards


class MetricSums:
    """Collects ``(sum, count)`` and maxima per key. Every rank must add the same keys (empty micro-batches do too), and
    ranks that train the same samples the same values, which count once.

    Values stay on their device until :meth:`reduce`, so that no micro-batch waits for them.
    """

    def __init__(self) -> None:
        self._tokens: dict[tuple[str, ...], Tensor] = {}  # sums of several keys, and their count
        self._sums: dict[str, Tensor] = {}
        self._peaks: dict[str, Tensor] = {}
        self._vectors: set[str] = set()

    def add_tokens(self, metrics: dict[str, Tensor], mask: Tensor) -> None:
        """Add per-token metrics ([T] each), to be averaged over the kept tokens."""
        stacked = torch.stack([metrics[key].detach().float() for key in metrics])
        sums = torch.where(mask, stacked, 0.0).sum(-1).double()
        _add(self._tokens, tuple(metrics), torch.cat([sums, mask.sum().double()[None]]))

    def add(self, key: str, value: float, count: float = 1.0) -> None:
        """Add a sum over ``count`` items of this rank."""
        _add(self._sums, key, torch.tensor([value, count], dtype=torch.float64))

    def add_vector(self, key: str, values: Tensor) -> None:
        """Add a vector of plain sums (read with :meth:`vector`)."""
        self._vectors.add(key)
        _add(self._sums, key, values.double())

    def peak(self, key: str, values: Tensor) -> None:
        """Update the maximum of a scalar or vector."""
        values = values.detach().double()
        self._peaks[key] = torch.maximum(self._peaks[key], values) if key in self._peaks else values

    def reduce(self, strategy: StrategyBase) -> None:
        """Combine all data ranks in place, in one collective: each puts its maxima into a separate row."""
        self._to_host()
        sums, peaks, data = _flat(self._sums), _flat(self._peaks), strategy.mesh.data
        rows = peaks.new_zeros(data.size, len(peaks))
        rows[data.index] = peaks
        total = strategy.sum_data_ranks(torch.cat([sums, rows.flatten()]))
        _unflatten(self._sums, total[:len(sums)])
        _unflatten(self._peaks, total[len(sums):].view_as(rows).amax(0))

    def _to_host(self) -> None:
        """Copy everything to the host, with one copy for all values on a device, and split the sums by key."""
        tables: list[dict[Any, Tensor]] = [self._tokens, self._sums, self._peaks]
        away = [(table, key) for table in tables for key, value in table.items() if value.device.type != "cpu"]
        if away:
            values = [table[key] for table, key in away]
            flat = torch.cat([value.reshape(-1) for value in values]).cpu()
            for (table, key), value, part in zip(away, values, flat.split([value.numel() for value in values])):
                table[key] = part.view(value.shape)
        for keys, vector in self._tokens.items():
            for key, total in zip(keys, vector):
                _add(self._sums, key, torch.stack([total, vector[-1]]))
        self._tokens = {}

    def keys(self) -> list[str]:
        """Return the keys that have a mean."""
        self._to_host()
        return [key for key in self._sums if key not in self._vectors]

    def counted(self) -> list[str]:
        """Return the keys whose mean is over at least one item."""
        return [key for key in self.keys() if self._sums[key][1]]

    def peaks(self) -> list[str]:
        """Return the keys that have a maximum."""
        return list(self._peaks)

    def mean(self, key: str) -> float:
        """Return sum over count; 0 where nothing was counted."""
        self._to_host()
        total, count = self._sums[key].tolist()
        return total / count if count else 0.0

    def vector(self, key: str) -> Tensor:
        """Return a vector added with :meth:`add_vector`, or a maximum."""
        self._to_host()
        return self._sums[key] if key in self._sums else self._peaks[key]


def _add(table: dict[Any, Tensor], key: Any, value: Tensor) -> None:
    table[key] = table[key] + value if key in table else value


def _flat(table: dict[str, Tensor]) -> Tensor:
    """Concatenate all values, in the order of their keys."""
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(table[key].reshape(-1) for key in sorted(table))])


def _unflatten(table: dict[str, Tensor], flat: Tensor) -> None:
    """Undo :func:`_flat`, in place."""
    keys = sorted(table)
    pieces = flat.split([table[key].numel() for key in keys])
    table.update({key: piece.view_as(table[key]) for key, piece in zip(keys, pieces)})


def response_metrics(shards: Shards, seconds: float) -> dict[str, float]:
    """Return ``rollout/*``: prompts, samples, generated tokens, speed, lengths, share that hit the length limit, and
    the mean of -log p over the sampled tokens, which estimates the entropy without a forward pass.

    They count what the policy drew. ``rollout/whole_len/*`` is the length with what an environment wrote between, where
    one wrote anything.
    """
    lengths, tokens = shards.drawn.float(), shards.drawn.sum().double().item()
    return _whole_lengths(shards) | {
        "rollout/prompts": len(shards.group_ids.unique()),
        "rollout/samples": shards.size,
        "rollout/tokens": tokens,
        "rollout/tokens_per_s": tokens / max(seconds, 1e-9),
        "rollout/response_len/mean": lengths.mean().item(),
        "rollout/response_len/min": lengths.min().item(),
        "rollout/response_len/max": lengths.max().item(),
        "rollout/truncated_frac": shards.truncated.float().mean().item(),
        "rollout/entropy_estimate": shards.surprisals.sum().item() / max(tokens, 1.0),
    }


def _whole_lengths(shards: Shards) -> dict[str, float]:
    if torch.equal(shards.response_lens, shards.drawn):
        return {}
    whole = shards.response_lens.float()
    return {"rollout/whole_len/mean": whole.mean().item(), "rollout/whole_len/max": whole.max().item()}


def number_metrics(shards: Shards) -> dict[str, float]:
    """Return ``response/<name>/mean``, ``min`` and ``max`` of the declared numbers, over the responses or the tokens
    that have them; nothing of a number that none has."""
    metrics: dict[str, float] = {}
    for name, values in shards.exp.extra.items():
        stats = moments(values[~values.isnan()].double(), shards.ranks)
        kinds = ("mean", "min", "max") if stats.size else ()
        metrics |= {f"response/{name}/{kind}": getattr(stats, kind) for kind in kinds}
    return metrics


def staleness_metrics(shards: Shards, step: int) -> dict[str, float]:
    """Return ``rollout/stale*``: versions by which the weights of ``step`` are ahead of those that drew each token."""
    exp = shards.exp
    age = (step - exp.weight_versions[exp.weight_versions >= 0]).float()
    ages = moments(age, shards.ranks)
    return {
        "rollout/staleness/mean": ages.mean,
        "rollout/staleness/max": ages.max,
        "rollout/stale_frac": moments((age > 0).float(), shards.ranks).mean,
    }
