"""Ranks that run one engine together: each brings its own prompts, all generate all of them, each keeps its own."""
from itertools import chain, islice

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.rollout.engine import Request


def _encode(requests: list[Request]) -> Tensor:
    """int64: for each request how many tokens, seeds and prefixes it has and how long these are, then all of them."""
    numbers: list[int] = []
    for request in requests:
        parts = [request.token_ids, request.seeds, *request.prefixes]
        numbers += [len(parts), *map(len, parts), *chain.from_iterable(parts)]
    return torch.tensor(numbers, dtype=torch.int64)


def _decode(numbers: list[int]) -> list[Request]:
    requests, rest = [], iter(numbers)
    for count in rest:
        lengths = list(islice(rest, count))
        token_ids, seeds, *prefixes = (list(islice(rest, length)) for length in lengths)
        requests.append(Request(token_ids, seeds, prefixes=prefixes))
    return requests


def share_requests(requests: list[Request], group: dist.ProcessGroup | None) -> tuple[list[Request], slice]:
    """The text requests of all ranks of ``group`` (a CPU group), rank by rank, and where those of this rank are in
    them. A collective of two all-gathers of tensors; without a group there is nothing to share."""
    if group is None:
        return requests, slice(0, len(requests))
    mine, size = _encode(requests), dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    longest = max(int(length) for length in lengths)
    rows = [torch.zeros(longest, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(rows, torch.cat([mine, mine.new_zeros(longest - len(mine))]), group=group)
    parts = [_decode(row[:int(length)].tolist()) for row, length in zip(rows, lengths)]
    start = sum(len(part) for part in parts[:dist.get_rank(group)])
    return [request for part in parts for request in part], slice(start, start + len(requests))


def any_of_group(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether ``flag`` holds on any rank of ``group``. A collective."""
    if group is None:
        return flag
    number = torch.tensor([int(flag)])
    dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
    return bool(number.item())
