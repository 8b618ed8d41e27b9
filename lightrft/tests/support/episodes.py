"""Short forms for tests of engines: groups of unfinished episodes, and the responses that an engine has generated."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter
from typing import Any

from lightrft.rollout import scheduler
from lightrft.rollout.engine import SamplingParams, SteppedEngine
from lightrft.types import Episode, Key, Prompt


@dataclass(frozen=True)
class Group:
    """One prompt and the seeds of its responses. ``prefixes``: the tokens that each has already; ``unexpanded``: the
    prompt with one placeholder per medium."""
    token_ids: list[int]
    seeds: list[int]
    media: tuple[str, ...] = ()
    prefixes: list[list[int]] = field(default_factory=list)
    unexpanded: list[int] = field(default_factory=list)

    @property
    def prompt(self) -> Prompt:
        """The prompt, as the data set would give it."""
        return Prompt("", self.token_ids, "", media=self.media, unexpanded_ids=self.unexpanded)

    def episodes(self, number: int, role: str = "sample") -> list[Episode]:
        """Return new unfinished episodes."""
        episodes = Episode.group(self.prompt, number, self.seeds, role)
        for episode, prefix in zip(episodes, self.prefixes):
            episode.give(prefix)
        return episodes


def episodes_of(groups: Sequence[Group], role: str = "sample", first: int = 0) -> list[Episode]:
    """Return new unfinished episodes of groups, whose numbers count from ``first``."""
    return [episode for number, group in enumerate(groups, first) for episode in group.episodes(number, role)]


def keyed(groups: Sequence[Group], role: str = "sample") -> dict[Key, Episode]:
    """Return the episodes of :func:`episodes_of` by their keys, for an engine without a scheduler."""
    return {episode.key: episode for episode in episodes_of(groups, role)}


@dataclass
class Response:
    """What an episode has behind the prefix of its group: tokens, log-probs, how it ended, and the runs [start, stop)
    that the policy did not draw."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    given: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, group: Group, episode: Episode) -> "Response":
        """Return what ``episode`` has behind its prefix."""
        response = cls([], [], episode.finish_reason)
        for segment in episode.segments[bool(group.prefixes and group.prefixes[episode.index]):]:
            start = len(response.token_ids)
            response.extend(cls(segment.token_ids, segment.logprobs, episode.finish_reason))
            response.given += [] if segment.drawn else [(start, len(response.token_ids))]
        return response

    @classmethod
    def part(cls, episode: Episode) -> "Response":
        """Return what an episode has drawn since tokens were given."""
        part = cls([], [], episode.finish_reason)
        for segment in reversed([*takewhile(attrgetter("drawn"), reversed(episode.segments))]):
            part.extend(cls(segment.token_ids, segment.logprobs, episode.finish_reason))
        return part

    @property
    def drawn(self) -> list[bool]:
        """One flag per token."""
        flags = [True] * len(self.token_ids)
        for start, stop in self.given:
            flags[start:stop] = [False] * (stop - start)
        return flags

    def extend(self, more: "Response") -> None:
        """Append what was generated after these tokens, with its finish reason."""
        begun = len(self.token_ids)
        self.token_ids, self.logprobs = self.token_ids + more.token_ids, self.logprobs + more.logprobs
        self.given = self.given + [(begun + start, begun + stop) for start, stop in more.given]
        self.finish_reason = more.finish_reason


Ended = list[tuple[int, int, Response]]  # number of the group, index in it, response


def generate(engine: SteppedEngine, groups: Sequence[Group], params: SamplingParams,
             on_finished: Callable[[int, list[Response]], Any] | None = None,
             on_arrived: Callable[[Ended], Any] | None = None,
             next_turn: Callable[[Ended], Sequence[Any]] | None = None) -> list[list[Response]]:  # yapf: disable
    """Generate the responses of groups, in their order, through the scheduler of ``engine``.

    Args:
        on_finished: gets the number of each group and its responses when it is finished; True: no further token is
            needed.
        on_arrived: gets the responses of each round that have ended, before ``on_finished``.
        next_turn: returns the next turn of each response that has drawn a stop token.
    """
    episodes, reported = [group.episodes(i) for i, group in enumerate(groups)], dict[int, list[Response]]()

    def ended(some: list[Episode]) -> Ended:
        return [(each.group_id, each.index, Response.of(groups[each.group_id], each)) for each in some]

    def responses(i: int) -> list[Response]:
        return [Response.of(groups[i], episode) for episode in episodes[i]]

    def finished(i: int) -> bool:
        reported[i] = responses(i)
        return on_finished is not None and bool(on_finished(i, reported[i]))

    def heard(now: scheduler.Round) -> bool:
        if on_arrived is not None:
            on_arrived(ended(now.episodes))
        return any([finished(group[0].group_id) for group in now.groups])

    enough = any([finished(i) for i, group in enumerate(episodes) if not group])  # nothing is asked for
    asked = [] if enough else [episode for group in episodes for episode in group]
    scheduler.generate(engine, asked, params, next_turn and (lambda stopped: next_turn(ended(stopped))), heard)
    return [reported[i] if i in reported else responses(i) for i in range(len(groups))]
