"""Ranks that run one engine together: episodes of all ranks are gathered, and each rank keeps its own responses."""
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.rollout.engine import FINISH_REASONS
from lightrft.rollout.partwise import Part
from lightrft.rollout.turns import Turn
from lightrft.strategy.mesh import Mesh
from lightrft.types import Branch, Episode, Key, Prompt, prompt_groups, Segment
from lightrft.utils.env import World
from lightrft.utils.errors import UserError

T = TypeVar("T")
Record = list[list[int]]


def _encode(records: Iterable[Record]) -> Tensor:
    """Encode records as int64: for each, the number of its lists, their lengths, their items."""
    numbers: list[int] = []
    for lists in records:
        numbers += [len(lists), *map(len, lists), *chain.from_iterable(lists)]
    return torch.tensor(numbers, dtype=torch.int64)


def _decode(numbers: list[int]) -> list[Record]:
    records, stream = [], iter(numbers)
    for count in stream:
        lengths = list(islice(stream, count))
        records.append([list(islice(stream, length)) for length in lengths])
    return records


def _gather(records: Iterable[Record], group: dist.ProcessGroup) -> list[list[Record]]:
    """Gather the records of each rank of ``group`` (a CPU group). A collective of two all-gathers of tensors."""
    row, size = _encode(records), dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(row)]), group=group)
    longest = max(int(length) for length in lengths)
    rows = [torch.zeros(longest, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(rows, torch.cat([row, row.new_zeros(longest - len(row))]), group=group)
    return [_decode(row[:int(length)].tolist()) for row, length in zip(rows, lengths)]


def share_episodes(episodes: Sequence[Episode],
                   group: dist.ProcessGroup | None) -> tuple[list[tuple[Key, Episode]], range]:  # yapf: disable
    """Gather the unfinished episodes of all ranks of ``group``, rank by rank, those of other ranks as far as an engine
    reads them; return them with their keys, and the range of this rank's. The roles of the keys begin with the rank, so
    that no two ranks have one. A collective; without a group there is nothing to share. Of media the keys are sent.
    """
    if group is None:
        return [(episode.key, episode) for episode in episodes], range(len(episodes))
    records, rank = _gather((_record(members) for members in prompt_groups(episodes)), group), dist.get_rank(group)
    ranks = [[(episode.key, episode) for record in groups for episode in _episodes(number, record)]
             for number, groups in enumerate(records)]
    ranks[rank] = [(key, episode) for (key, _), episode in zip(ranks[rank], episodes, strict=True)]
    start = sum(map(len, ranks[:rank]))
    return [*chain.from_iterable(ranks)], range(start, start + len(episodes))


def _record(members: list[Episode]) -> Record:
    """Encode the episodes of a group."""
    first, prompt = members[0], members[0].prompt
    return [[first.group_id], [*first.role.encode()], *_lists(prompt), [episode.index for episode in members],
            [episode.seed for episode in members], [len(episode.closed) for episode in members],
            *(episode.response_ids for episode in members)]  # yapf: disable


def _episodes(rank: int, record: Record) -> list[Episode]:
    """Decode the episodes of a group of ``rank``."""
    (group_id, ), role, token_ids, unexpanded, media, indices, seeds, closed, *begun = record
    prompt, role_of_rank = _prompt(token_ids, unexpanded, media), f"{rank}/{_text(role)}"
    episodes = [Episode(prompt, group_id, index, role=role_of_rank, seed=seed, closed=[Branch(prompt)] * count)
                for index, seed, count in zip(indices, seeds, closed)]  # yapf: disable
    for episode, response_ids in zip(episodes, begun, strict=True):
        episode.give(response_ids)
    return episodes


def _text(numbers: Iterable[float]) -> str:
    return bytes(map(int, numbers)).decode()


def share_turns(turns: dict[Key, Turn], group: dist.ProcessGroup | None) -> dict[Key, Turn]:
    """Gather the next turns that each rank of ``group`` has for responses: tokens that are appended, prompts of other
    branches as far as an engine reads them, or None: it finishes them. A collective.

    Raises:
        UserError: a turn shows media, which ranks that share an engine do not exchange.
    """
    if group is None:
        return turns
    if shown := [key for turn in turns.values() if isinstance(turn, Segment) for key in turn.media]:
        raise UserError(f"an environment has shown {', '.join(shown)}, and ranks that share an engine take media of "
                        "prompts alone: use --engine_type hf")
    records = _gather(([[*key.role.encode()], [key.group, key.index], *_lists(turn)] for key, turn in turns.items()),
                      group)
    return {Key(_text(role), *numbers): _turn(lists) for role, numbers, *lists in chain.from_iterable(records)}


def _lists(turn: Turn) -> Record:
    """Encode a turn: no list to finish, one of tokens, or those of a prompt."""
    if isinstance(turn, Prompt):
        return [turn.token_ids, turn.unexpanded_ids, [*",".join(turn.media).encode()]]
    return [] if turn is None else [Segment.given(turn).token_ids]


def _turn(lists: Record) -> Turn:
    """Decode a turn."""
    return _prompt(*lists) if len(lists) > 1 else lists[0] if lists else None


def _prompt(token_ids: list[int], unexpanded_ids: list[int], media: list[int]) -> Prompt:
    keys = tuple(_text(media).split(",")) if media else ()
    return Prompt("", token_ids, "", media=keys, unexpanded_ids=unexpanded_ids)


def all_of_group(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """True if ``flag`` holds on every rank of ``group``. A collective."""
    if group is None:
        return flag
    number = torch.tensor([int(flag)])
    dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
    return bool(number.item())


def world_of(mesh: Mesh) -> World:
    """Return the ranks of ``mesh`` as if they were all: those of the machine count with the ranks beside the mesh."""
    return replace(World.from_env(), rank=mesh.engines.index, world_size=mesh.engines.size)


def tensor_of_first(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Broadcast the one-dimensional tensor of the first rank of ``group`` to all of them. A collective."""
    if group is None:
        return tensor
    length = torch.tensor([len(tensor)])
    dist.broadcast(length, group=group, group_src=0)
    tensor = tensor if dist.get_rank(group) == 0 else tensor.new_empty(int(length))
    dist.broadcast(tensor, group=group, group_src=0)
    return tensor


def object_of_first(value: T, group: dist.ProcessGroup | None) -> T:
    """Broadcast the object of the first rank of ``group`` to all of them. A collective."""
    box = [value]
    if group is not None:
        dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def parts_of_first(parts: list[Part], group: dist.ProcessGroup | None) -> list[Part]:
    """Broadcast the parts of responses that the first rank of ``group`` has drawn to all of them. A collective."""
    if group is None:
        return parts
    numbers: list[float] = []
    for key, token_ids, logprobs, reason in parts:
        role = key.role.encode()
        numbers += [len(role), *role, key.group, key.index, FINISH_REASONS.index(reason), len(token_ids), *token_ids,
                    *logprobs]  # yapf: disable
    stream = iter(tensor_of_first(torch.tensor(numbers, dtype=torch.float64), group).tolist())
    return [_part(int(length), stream) for length in stream]


def _part(role_length: int, numbers: Iterator[float]) -> Part:
    """Read one part, behind the length of its role."""
    role = _text(islice(numbers, role_length))
    group_id, index, reason, length = map(int, islice(numbers, 4))
    token_ids = [int(number) for number in islice(numbers, length)]
    return Part(Key(role, group_id, index), token_ids, list(islice(numbers, length)), FINISH_REASONS[reason])
