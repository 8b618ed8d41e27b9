"""Ranks that run one engine together: prompts of all ranks are gathered, and each rank keeps its own responses."""
from collections.abc import Iterable, Iterator
from datetime import timedelta
from itertools import chain, islice
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.rollout.engine import Completion, Ended, FINISH_REASONS, Key, Request
from lightrft.utils.env import World

T = TypeVar("T")
Record = list[list[int]]


def _encode(records: Iterable[Record]) -> Tensor:
    """Encode records as int64: for each, the number of its lists, their lengths, their items."""
    numbers: list[int] = []
    for lists in records:
        numbers += [len(lists), *map(len, lists), *chain.from_iterable(lists)]
    return torch.tensor(numbers, dtype=torch.int64)


def _decode(numbers: list[int]) -> list[Record]:
    records, rest = [], iter(numbers)
    for count in rest:
        lengths = list(islice(rest, count))
        records.append([list(islice(rest, length)) for length in lengths])
    return records


def _gather(records: Iterable[Record], group: dist.ProcessGroup) -> list[list[Record]]:
    """Gather the records of each rank of ``group`` (a CPU group). A collective of two all-gathers of tensors."""
    mine, size = _encode(records), dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    longest = max(int(length) for length in lengths)
    rows = [torch.zeros(longest, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(rows, torch.cat([mine, mine.new_zeros(longest - len(mine))]), group=group)
    return [_decode(row[:int(length)].tolist()) for row, length in zip(rows, lengths)]


def share_requests(requests: list[Request], group: dist.ProcessGroup | None) -> tuple[list[Request], range]:
    """Gather the requests of all ranks of ``group``, rank by rank; return them and the range of this rank's. A
    collective; without a group there is nothing to share. Of media the keys are sent."""
    if group is None:
        return requests, range(len(requests))
    parts = _gather(([one.token_ids, one.seeds, one.unexpanded, list(",".join(one.media).encode()), *one.prefixes]
                     for one in requests), group)  # yapf: disable
    start = sum(len(part) for part in parts[:dist.get_rank(group)])
    everyone = [Request(token_ids, seeds, tuple(bytes(keys).decode().split(",")) if keys else (), prefixes, unexpanded)
                for part in parts for token_ids, seeds, unexpanded, keys, *prefixes in part]  # yapf: disable
    return everyone, range(start, start + len(requests))


def share_turns(turns: dict[Key, list[int] | None], group: dist.ProcessGroup | None) -> dict[Key, list[int] | None]:
    """Gather the tokens that each rank of ``group`` appends to responses; None: it finishes them. A collective."""
    if group is None:
        return turns
    parts = _gather(([list(key), *([] if token_ids is None else [token_ids])] for key, token_ids in turns.items()),
                    group)  # yapf: disable
    return {(i, j): appended[0] if appended else None for (i, j), *appended in chain.from_iterable(parts)}


def all_of_group(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """True if ``flag`` holds on every rank of ``group``. A collective."""
    if group is None:
        return flag
    number = torch.tensor([int(flag)])
    dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
    return bool(number.item())


def group_of(size: int, world: World, limit_s: int) -> dist.ProcessGroup | None:
    """CPU process group of this rank among ``size`` consecutive ones; None for 1. A collective of all ranks.

    ``limit_s``: seconds after which a collective of the group that does not finish is an error.
    """
    limit = timedelta(seconds=limit_s)
    groups = [dist.new_group(range(first, first + size), limit, "gloo") for first in range(0, world.world_size, size)
              if size > 1]  # yapf: disable
    return groups[world.rank // size] if groups else None


def tensor_of_first(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Broadcast the one-dimensional tensor of the first rank of ``group`` to all of them. A collective."""
    if group is None:
        return tensor
    length = torch.tensor([len(tensor)])
    dist.broadcast(length, group=group, group_src=0)
    tensor = tensor if dist.get_rank(group) == 0 else tensor.new_empty(int(length))
    dist.broadcast(tensor, group=group, group_src=0)
    return tensor


def object_of_first(found: T, group: dist.ProcessGroup | None) -> T:
    """Broadcast the object of the first rank of ``group`` to all of them. A collective."""
    box = [found]
    if group is not None:
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def completions_of_first(ended: Ended, group: dist.ProcessGroup | None) -> Ended:
    """Broadcast the parts of responses that the first rank of ``group`` has drawn to all of them. A collective."""
    if group is None:
        return ended
    numbers: list[float] = []
    for i, j, one in ended:
        numbers += [i, j, FINISH_REASONS.index(one.finish_reason), len(one.token_ids), *one.token_ids, *one.logprobs]
    rest = iter(tensor_of_first(torch.tensor(numbers, dtype=torch.float64), group).tolist())
    return [(int(i), int(next(rest)), _completion(rest)) for i in rest]


def _completion(numbers: Iterator[float]) -> Completion:
    reason, length = int(next(numbers)), int(next(numbers))
    token_ids = [int(number) for number in islice(numbers, length)]
    return Completion(token_ids, list(islice(numbers, length)), FINISH_REASONS[reason])
