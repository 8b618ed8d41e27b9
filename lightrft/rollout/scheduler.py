"""Episodes on an engine: the ranks that share it run one scheduler alike, for all callers of the engine."""
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from types import TracebackType
from typing import NamedTuple, Protocol, runtime_checkable

from lightrft.models.vocabulary import check_ids
from lightrft.rollout.engine import (Completion, FINISH_REASONS, Generated, Key, Request, SamplingParams, SteppedEngine)
from lightrft.rollout.tp_group import all_of_group, share_requests, share_turns
from lightrft.types import Episode, Prompt
from lightrft.utils.watchdog import tick

_POLL_S = 1e-3  # between two looks at answers while all responses wait

Turn = list[int] | None  # tokens that are given to a response before it resumes; None: it is finished


@runtime_checkable
class PendingTurn(Protocol):
    """A turn that may not be there yet, such as a :class:`concurrent.futures.Future`."""

    def done(self) -> bool:
        """Return True once the turn is there."""

    def result(self) -> Turn:
        """Return the turn, or raise the error that it met."""


NextTurn = Callable[[list[Episode]], Sequence[Turn | PendingTurn]]


@dataclass
class Quota:
    """Policy that ends a run early: once ``groups`` groups of this rank are finished (more are open than a step needs),
    and those of ``due``, whose tokens would be too old in the next step.

    ``finished``: numbers of the finished groups.
    """
    groups: int
    due: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)

    @property
    def met(self) -> bool:
        """True once no further token is needed."""
        return len(self.finished) >= self.groups and self.due <= self.finished


class Round(NamedTuple):
    """Episodes of this rank that one round has finished, and the groups that have no open episode any more."""
    episodes: list[Episode]
    groups: list[list[Episode]]


Heard = Callable[[Round], bool | None]


def generate(engine: SteppedEngine, episodes: Sequence[Episode], params: SamplingParams,
             next_turn: NextTurn | None = None, heard: Heard | None = None) -> None:
    """Generate unfinished episodes to their end, beside those of other callers; a collective of the ranks that share
    the engine.

    Args:
        next_turn: connects tools and environments. It gets the episodes of this rank that have just drawn a stop
            token, and returns the next turn of each, at once or later; meanwhile the others go on. ``max_new_tokens``
            counts given tokens too: a turn after which no token could be drawn is dropped, and the response ends with
            "length". All ranks pass it, or none does.
        heard: hears of finished episodes, round by round. Once it returns True, this rank needs no further token. As
            soon as no rank needs any and a group is finished, the run ends: unfinished responses stay as they are
            ("abort"), perhaps empty. They can be submitted again.

    Raises:
        UserError: ``next_turn`` gives a token that the model does not have.
    """
    with Scheduler.of(engine).submit(episodes, params, next_turn) as run:
        while run.wanted:
            finished = run.step()
            if heard is not None and finished.episodes:
                run.enough |= bool(heard(finished))


@dataclass(eq=False)
class Run:
    """Episodes that one caller has submitted. Leaving its context ends those that are unfinished.

    Attributes:
        left: unfinished responses of each group, of all ranks that share the engine.
        groups: those of this rank.
        enough: this rank needs no further token.
    """
    scheduler: "Scheduler"
    params: SamplingParams
    next_turn: NextTurn | None
    groups: dict[int, list[Episode]] = field(default_factory=dict)  # by the number of their request
    left: Counter[int] = field(default_factory=Counter)
    enough: bool = False
    stopped: bool = False
    _ended: list[tuple[int, Episode]] = field(default_factory=list)  # of all ranks, since the last call of step
    _news: bool = False  # groups were completed since ranks have last agreed to go on

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.scheduler.stop(self, wait=kind is None)

    @property
    def wanted(self) -> bool:
        """True while a rank needs a further token, or has not heard of all. A collective if groups were completed."""
        if self._ended or not (self._news and self.left):
            return bool(self._ended or self.left)
        self._news = False
        return not all_of_group(self.enough or not self.groups.keys() & self.left, self.scheduler.engine.group)

    def step(self) -> Round:
        """Return what has finished since the last call: in rounds of other callers, or else in the next one."""
        if not self._ended:
            self.scheduler.step()
        ended, self._ended = self._ended, []
        complete = [number for number in dict.fromkeys(number for number, _ in ended) if number not in self.left]
        self._news |= bool(complete)
        return Round([episode for number, episode in ended if number in self.groups],
                     [self.groups[number] for number in complete if number in self.groups])

    def end(self, number: int, episode: Episode) -> None:
        """Note that an episode of a group has ended."""
        self.left[number] -= 1
        if not self.left[number]:
            del self.left[number]
        self._ended.append((number, episode))


class Flight(NamedTuple):
    """An unfinished response. ``episode`` stands in for that of another rank if the group is not in ``run.groups``."""
    run: Run
    episode: Episode

    @property
    def room(self) -> int:
        """Tokens that it may still have."""
        return self.run.params.max_new_tokens - self.episode.response_len


_SCHEDULERS: "weakref.WeakKeyDictionary[SteppedEngine, Scheduler]" = weakref.WeakKeyDictionary()


class Scheduler:
    """Scheduler of all episodes of one engine: it brings what a round ends to the run that has submitted it, asks for
    next turns and resumes responses.

    Ranks that share the engine submit, step and stop alike. Each submits its own episodes, and knows how many tokens
    those of the others have.

    Attributes:
        flights: unfinished responses.
        waiting: those that wait for a turn; those of this rank with the turn.
    """

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = weakref.ref(engine)
        self.flights: dict[Key, Flight] = {}
        self.waiting: dict[Key, Turn | PendingTurn] = {}

    @classmethod
    def of(cls, engine: SteppedEngine) -> "Scheduler":
        """Return the one scheduler of ``engine``."""
        if engine not in _SCHEDULERS:
            _SCHEDULERS[engine] = cls(engine)
        return _SCHEDULERS[engine]

    @property
    def engine(self) -> SteppedEngine:
        """The engine, which outlives its scheduler."""
        engine = self._engine()
        assert engine is not None, "callers hold it"
        return engine

    def submit(self, episodes: Iterable[Episode], params: SamplingParams, next_turn: NextTurn | None = None) -> Run:
        """Submit unfinished episodes; neighbours of one role and group share their prompt. A collective of the ranks
        that share the engine."""
        groups = _groups(episodes)
        requests, mine = share_requests([_request(group) for group in groups], self.engine.group)
        run = Run(self, params, next_turn)
        if not requests:
            return run
        first = self.engine.submit(requests, params, waits=next_turn is not None)
        for number, request in enumerate(requests, first):
            own = number - first in mine
            members = groups[number - first - mine.start] if own else _stand_ins(request)
            run.groups |= {number: members} if own else {}
            run.left[number] = len(members)
            self.flights |= {(number, j): Flight(run, episode) for j, episode in enumerate(members)}
        return run

    def step(self) -> None:
        """Run one round of the engine. Waits a moment if every response waits for its next turn. An error ends all
        episodes of all callers."""
        tick()
        with ExitStack() as after_an_error:
            after_an_error.callback(self._lose_all)
            parts = self.engine.step()
            if not parts and len(self.waiting) == len(self.flights):
                time.sleep(_POLL_S)
            ended, stopped = self._store(parts)
            self._go_on(ended | self._turns(stopped))
            after_an_error.pop_all()

    def _store(self, parts: Iterable[Generated]) -> tuple[dict[Key, Turn], list[Key]]:
        """Append parts to their episodes; return those that have ended, without a next turn, and those that wait."""
        ended, stopped = dict[Key, Turn](), list[Key]()
        for number, sample, part in parts:
            if (flight := self.flights.get(key := (number, sample))) is not None:
                _check_part(part, flight)
                flight.episode.add(part, self.engine.weight_version)
                if part.finish_reason == "stop" and flight.run.next_turn is not None:
                    stopped.append(key)
                else:
                    ended[key] = None
        return ended, stopped

    def _lose_all(self) -> None:
        """Forget all episodes, which an error has ended."""
        for flight in self.flights.values():
            flight.run.left.clear()
        keys, self.flights, self.waiting = [*self.flights], {}, {}
        self.engine.abort(keys)

    def _turns(self, stopped: list[Key]) -> dict[Key, Turn]:
        """Ask for the next turns of responses that have drawn a stop token, each rank for its own; return the turns
        that are there, of all ranks."""
        self.waiting |= dict.fromkeys(stopped)
        for run in dict.fromkeys(self.flights[key].run for key in stopped):
            own = [key for key in stopped if self.flights[key].run is run and key[0] in run.groups]
            if own and run.next_turn is not None:
                turns = run.next_turn([self.flights[key].episode for key in own])
                self.waiting |= zip(own, turns, strict=True)
        if not self.waiting:
            return {}
        own_turns = {key: _result(turn) for key, turn in self.waiting.items()
                     if key[0] in self.flights[key].run.groups and _is_there(turn)}  # yapf: disable
        ready = share_turns(own_turns, self.engine.group)
        self.waiting = {key: turn for key, turn in self.waiting.items() if key not in ready}
        return ready

    def _go_on(self, turns: dict[Key, Turn]) -> None:
        """Resume the responses that have a next turn with room behind it, and end the others."""
        ended = [key for key, turn in turns.items() if not self._resumes(key, turn)]
        if waited := [key for key in ended if self.flights[key].run.next_turn is not None]:
            self.engine.abort(waited)
        for key in ended:
            flight = self.flights.pop(key)
            flight.run.end(key[0], flight.episode)

    def _resumes(self, key: Key, turn: Turn) -> bool:
        """Give a response its next turn; False if it ends."""
        run, episode = flight = self.flights[key]
        if turn is None:
            return False
        check_ids(f"the next turn of response {episode.index} to prompt {episode.group_id}", turn,
                  self.engine.vocabulary)
        if len(turn) >= flight.room:
            episode.finish_reason = "length"
            return False
        episode.give(turn)
        if not run.stopped:
            self.engine.resume(key, turn)
        return not run.stopped

    def stop(self, run: Run, wait: bool = True) -> None:
        """End the unfinished episodes of ``run``, of which nobody hears any more.

        Args:
            wait: for what they have drawn, and for turns that are under way, without which they could not resume.
        """
        run.stopped = True
        keys = [key for key, flight in self.flights.items() if flight.run is run]
        if keys:
            self.engine.abort(keys)
        while wait and run.left:
            self.step()
        for key in keys:
            self.flights.pop(key, None)
            self.waiting.pop(key, None)


def _check_part(part: Completion, flight: Flight) -> None:
    """Refuse a part that no engine may return.

    Raises:
        RuntimeError: an unknown reason, more tokens than the response may have, or not one log-prob per token.
    """
    drawn, room = len(part.token_ids), flight.room
    if part.finish_reason not in FINISH_REASONS or drawn > room or drawn != len(part.logprobs):
        raise RuntimeError(f"the engine returned {drawn} tokens with {len(part.logprobs)} log-probs and the reason "
                           f"{part.finish_reason!r} for a response that may have {room} further tokens; reasons are "
                           f"{', '.join(FINISH_REASONS)}")


def _groups(episodes: Iterable[Episode]) -> list[list[Episode]]:
    """Return the neighbours of one role and group, which share their prompt."""
    return [[*group] for _, group in groupby(episodes, lambda episode: episode.key[:2])]


def _request(group: list[Episode]) -> Request:
    """Request the rest of the episodes of a group."""
    begun = [episode.response_ids for episode in group]
    return Request.of(group[0].prompt, [episode.seed for episode in group], begun if any(begun) else [])


def _stand_ins(request: Request) -> list[Episode]:
    """Return what this rank knows of the episodes of another one: how many tokens they have."""
    prefixes = request.prefixes or [[]] * len(request.seeds)
    episodes = [Episode(Prompt("", [], ""), 0, j) for j in range(len(request.seeds))]
    for episode, prefix in zip(episodes, prefixes, strict=True):
        episode.give(prefix)
    return episodes


def _is_there(turn: Turn | PendingTurn) -> bool:
    return not isinstance(turn, PendingTurn) or turn.done()


def _result(turn: Turn | PendingTurn) -> Turn:
    return turn.result() if isinstance(turn, PendingTurn) else turn
