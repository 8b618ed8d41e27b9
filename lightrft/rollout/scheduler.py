"""Episodes on an engine: the ranks that share it run one scheduler alike, for all callers of the engine."""
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from lightrft.models.vocabulary import check_ids
from lightrft.rollout.engine import FINISH_REASONS, SamplingParams, SteppedEngine
from lightrft.rollout.tp_group import all_of_group, share_episodes, share_turns
from lightrft.rollout.turns import Given, is_there, NextTurn, PendingTurn, Turn, TURNS
from lightrft.types import Episode, Key, Prompt, Segment
from lightrft.utils.watchdog import Progress, tick

_IDLE_ROUNDS = 1000  # between two checks that rounds draw tokens
_LOOK_S = 1.0  # between two signs of life while all responses wait
_ROUND_S = 1e-2  # between two exchanges then, of ranks that share the engine: none hears of the answers of another

GroupKey = tuple[str, int]  # role and number of a prompt: the first two entries of a Key


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
             next_turn: NextTurn | None = None, heard: Heard | None = None, hears_cuts: bool = False) -> None:
    """Generate unfinished episodes to their end, while those of other callers continue; a collective of the ranks that
    share the engine.

    Args:
        next_turn: connects tools and environments. It gets the episodes of this rank that have just drawn a stop
            token, and returns the next turn of each, at once or later; meanwhile the others go on. ``max_new_tokens``
            counts given tokens too: a turn after which no token could be drawn is dropped, and the response ends with
            "length". A prompt as a turn opens another branch of the response, which may have as many tokens again. All
            ranks pass it, or none does.
        heard: hears of finished episodes, round by round. Once it returns True, this rank needs no further token. As
            soon as no rank needs any and a group is finished, the run ends: unfinished responses stay as they are
            ("abort"), perhaps empty. They can be submitted again.
        hears_cuts: ``next_turn`` also gets the episodes that the limit has cut ("length"); it may answer with None
            alone, later perhaps.

    Raises:
        UserError: ``next_turn`` gives a token that the model does not have.
    """
    with Scheduler.of(engine).submit(episodes, params, next_turn) as run:
        run.hears_cuts = hears_cuts
        while run.wanted:
            finished = run.step()
            if heard is not None and finished.episodes:
                run.enough |= bool(heard(finished))


@dataclass(eq=False)
class Run:
    """Episodes that one caller has submitted. Leaving its context ends those that are unfinished.

    Attributes:
        left: unfinished responses of each group, of all ranks that share the engine.
        groups: episodes of this rank.
        enough: this rank needs no further token.
        hears_cuts: ``next_turn`` gets episodes that the limit has cut, too.
    """
    scheduler: "Scheduler"
    params: SamplingParams
    next_turn: NextTurn | None
    groups: dict[GroupKey, list[Episode]] = field(default_factory=dict)
    left: Counter[GroupKey] = field(default_factory=Counter)
    enough: bool = False
    stopped: bool = False
    hears_cuts: bool = False
    _ended: list[tuple[GroupKey, Episode]] = field(default_factory=list)  # of all ranks, since the last call of step
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
        if not self._ended:
            return Round([], [])
        ended, self._ended = self._ended, []
        complete = [name for name in dict.fromkeys(name for name, _ in ended) if name not in self.left]
        self._news |= bool(complete)
        return Round([episode for name, episode in ended if name in self.groups],
                     [self.groups[name] for name in complete if name in self.groups])

    def begin(self, key: Key, episode: Episode, local: bool) -> None:
        """Note that an episode, perhaps of this rank itself, is open."""
        self.left[key[:2]] += 1
        if local:
            self.groups.setdefault(key[:2], []).append(episode)

    def end(self, key: Key, episode: Episode) -> None:
        """Note that an episode has ended."""
        self.left[name := key[:2]] -= 1
        if not self.left[name]:
            del self.left[name]
        self._ended.append((name, episode))


class Flight(NamedTuple):
    """An unfinished response. ``local``: it is of this rank; else ``episode`` stands in for that of another one."""
    run: Run
    episode: Episode
    local: bool

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
        flights: unfinished responses, by the key that the engine knows.
        waiting: those that wait for a turn; those of this rank with the turn.
    """

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = weakref.ref(engine)
        self.flights: dict[Key, Flight] = {}
        self.waiting: dict[Key, Turn | PendingTurn] = {}
        self._arrived = threading.Event()  # a turn came since all responses have last waited
        self._idle = 0  # rounds since one has shown progress
        self._aborting = False  # of episodes that nobody waits for

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
        """Submit unfinished episodes; neighbours of one role and group with the same prompt share it. A collective of
        the ranks that share the engine.

        Raises:
            ValueError: an episode has the key of another unfinished one, or cannot be run.
        """
        if self._aborting:  # what those have drawn must not come under the key of a new one
            self.step()
        everyone, local = share_episodes(episodes := list(episodes), self.engine.group)
        run = Run(self, params, next_turn)
        if not everyone:
            return run
        keys = Counter([*(key for key, _ in everyone), *self.flights])
        if twice := [key for key, count in keys.items() if count > 1]:
            raise ValueError(f"two unfinished episodes have one key, {twice[0]}: give those of another caller a role "
                             "of their own")
        self.engine.submit(dict(everyone), params, waits=next_turn is not None)
        for number, (key, episode) in enumerate(everyone):
            self.flights[key] = Flight(run, episode, number in local)
            run.begin(key, episode, number in local)
        return run

    def step(self) -> None:
        """Run one round of the engine. If every response waits for its next turn, so does this, for a while. An error
        ends all episodes of all callers.

        Raises:
            RuntimeError: the engine makes no progress.
        """
        done = False
        try:
            self._round()
            done = True
        finally:
            if not done:
                self._lose_all()

    def _round(self) -> None:
        """Run a round, and deal with what it ends; most end nothing."""
        engine, before, self._aborting = self.engine, Progress.ticks, False
        reported = engine.step()
        if reported:
            tick()
        elif self.waiting and len(self.waiting) == len(self.flights):
            self._arrived.wait(_LOOK_S if engine.group is None else _ROUND_S)
            self._arrived.clear()
            tick()
        self._idle = 0 if Progress.ticks != before else self._idle + 1
        if self._idle and self._idle % _IDLE_ROUNDS == 0:
            self._check_progress()
        if reported or self.waiting:
            ended, stopped = self._sorted(reported)
            self._go_on(ended | self._turns(stopped))

    def _check_progress(self) -> None:
        """Refuse an engine that draws nothing. A round that shows no progress may have drawn a token, so there are not
        more of them than tokens.

        Raises:
            RuntimeError: there are more.
        """
        drawing = [flight for key, flight in self.flights.items() if key not in self.waiting]
        if self._idle > sum(flight.episode.num_tokens + flight.room for flight in drawing):
            raise RuntimeError(
                f"{type(self.engine).__name__} has ended none of {len(drawing)} responses in {self._idle} "
                "rounds, which is more than their tokens: it draws none")

    def _sorted(self, reported: Iterable[Key]) -> tuple[dict[Key, Turn], list[Key]]:
        """Sort reported responses: those that have ended, without a next turn, and those that wait for one."""
        ended, stopped = dict[Key, Turn](), list[Key]()
        for key in reported:
            if (flight := self.flights.get(key)) is not None:
                _check(flight, self.engine.weight_version)
                reason = flight.episode.finish_reason
                asks = reason == "stop" or reason == "length" and flight.run.hears_cuts
                if asks and flight.run.next_turn is not None:
                    stopped.append(key)
                else:
                    ended[key] = None
        return ended, stopped

    def _lose_all(self) -> None:
        """Forget all episodes, which an error has ended."""
        for flight in self.flights.values():
            flight.run.left.clear()
            flight.run.stopped = True
        self.flights, self.waiting, self._idle = {}, {}, 0
        self.engine.reset()

    def _turns(self, stopped: list[Key]) -> dict[Key, Turn]:
        """Ask for the next turns of responses that have drawn a stop token, each rank for its own; return the turns
        that are there, of all ranks."""
        self.waiting |= dict.fromkeys(stopped)
        for run in dict.fromkeys(self.flights[key].run for key in stopped):
            keys = [key for key in stopped if self.flights[key].run is run and self.flights[key].local]
            if keys and run.next_turn is not None:
                self._wait_for(keys, run.next_turn([self.flights[key].episode for key in keys]))
        if not self.waiting:
            return {}
        came = {key: turn for key, turn in self.waiting.items() if self.flights[key].local and is_there(turn)}
        self._wait_for([*came], [turn if isinstance(turn, TURNS) else turn.result() for turn in came.values()])
        local_turns = {key: turn for key in came if isinstance(turn := self.waiting[key], TURNS)}
        ready = share_turns(local_turns, self.engine.group)
        self.waiting = {key: turn for key, turn in self.waiting.items() if key not in ready}
        return ready

    def _wait_for(self, keys: list[Key], turns: Sequence[Turn | PendingTurn]) -> None:
        """Let responses wait for their turns, and hear when these come."""
        arrived = self._arrived
        for key, turn in zip(keys, turns, strict=True):
            self.waiting[key] = turn
            if not isinstance(turn, TURNS):
                turn.add_done_callback(lambda _: arrived.set())

    def _go_on(self, turns: dict[Key, Turn]) -> None:
        """Resume the responses that have a next turn with room behind it, fork those that have another prompt, and end
        the others."""
        forks = {key: turn for key, turn in sorted(turns.items()) if isinstance(turn, Prompt)}
        ended = [key for key, turn in turns.items() if not isinstance(turn, Prompt) and not self._resumes(key, turn)]
        if waited := [key for key in (*ended, *forks) if self.flights[key].run.next_turn is not None]:
            self.engine.abort(waited)
        for key in (*ended, *self._fork(forks)):
            flight = self.flights.pop(key)
            flight.run.end(key, flight.episode)

    def _fork(self, prompts: dict[Key, Prompt]) -> list[Key]:
        """Let responses, which the engine does not know any more, go on behind other prompts; neighbours with the same
        prompt share it. Return those that nobody waits for, which stay as they are."""
        for key, prompt in prompts.items():
            self.flights[key].episode.fork(prompt)
        for run in dict.fromkeys(self.flights[key].run for key in prompts):
            if not run.stopped:
                going = {key: self.flights[key].episode for key in prompts if self.flights[key].run is run}
                self.engine.submit(going, run.params, waits=True)
        return [key for key in prompts if self.flights[key].run.stopped]

    def _resumes(self, key: Key, turn: Given | None) -> bool:
        """Give a response its next turn; False if it ends."""
        run, episode, _ = flight = self.flights[key]
        if turn is None:
            return False
        given, name = Segment.given(turn), f"the next turn of response {episode.index} to prompt {episode.group_id}"
        check_ids(name, given.token_ids, self.engine.vocabulary)
        if len(given.token_ids) >= flight.room:
            episode.finish_reason = "length"
        elif run.stopped:
            episode.give(given)
        else:
            self._resume(key, given)
            return True
        return False

    def _resume(self, key: Key, given: Segment) -> None:
        """Give a turn to the engine.

        Raises:
            RuntimeError: the response does not wait for it.
        """
        try:
            self.engine.resume(key, given)
        except KeyError as error:
            raise RuntimeError(f"{type(self.engine).__name__} has no waiting response {tuple(key)}, which has a next "
                               "turn: responses that are submitted with waits=True wait after a stop token") from error

    def stop(self, run: Run, wait: bool = True) -> None:
        """End the unfinished episodes of ``run``, of which nobody hears any more.

        Args:
            wait: for what they have drawn, and for turns that are under way, without which they could not resume.
        """
        if run.stopped:  # an error in a round has
            return
        run.stopped = True
        keys = [key for key, flight in self.flights.items() if flight.run is run]
        if len(keys) == len(self.flights) and not wait:
            self._lose_all()
        elif keys:
            self.engine.abort(keys)
            self._aborting = not wait
        while wait and run.left:
            self.step()
        for key in keys:
            self.flights.pop(key, None)
            self.waiting.pop(key, None)


def _check(flight: Flight, newest: int) -> None:
    """Check what an engine has appended to an episode; ``newest``: the version of the weights that it has.

    Raises:
        RuntimeError: an unknown reason, more tokens than the response may have, not one log-prob per token, or a
            version of the weights that the engine never had.
    """
    episode, most = flight.episode, flight.run.params.max_new_tokens
    tokens = sum(len(segment.token_ids) for segment in episode.segments)
    logprobs = sum(len(segment.logprobs) for segment in episode.segments)
    if episode.finish_reason not in FINISH_REASONS or tokens > most or tokens != logprobs:
        raise RuntimeError(f"the engine returned a response of {tokens} tokens, which may have {most}, with {logprobs} "
                           f"log-probs and the reason {episode.finish_reason!r}: give every token a log-prob; reasons "
                           f"are {', '.join(FINISH_REASONS)}")
    versions = [segment.version for segment in episode.segments if segment.drawn]
    if wrong := [version for version in versions if not 0 <= version <= newest]:
        raise RuntimeError(f"the engine returned tokens of the version {wrong[0]} of the weights, and has had versions "
                           f"from 0 to {newest}: append the version that drew them")
