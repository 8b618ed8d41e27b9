"""Answers of environments under way, as turns that a scheduler waits for."""
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from lightrft.datasets.rows import DataError
from lightrft.environments.base import Failure, Step
from lightrft.environments.pool import Answer
from lightrft.rollout.turns import PendingTurn, Turn
from lightrft.types import Episode
from lightrft.utils.play import Play


class Host(Protocol):
    """Who plays the episodes."""

    def log_once(self, failure: Failure) -> None:
        """Log the first failure of each cause."""

    def following(self, pending: "PendingAnswer", answer: Step) -> "Turn | PendingTurn":
        """Return what follows a turn, by its ``answer``."""


@dataclass(frozen=True)
class Asked:
    """Call of the environment of ``episode``, made at the time ``asked``."""
    player: Host
    episode: Episode
    answer: "Future[Answer]"
    asked: float

    def done(self) -> bool:
        """Return True once the environment has answered, or failed."""
        return self.answer.done()

    def add_done_callback(self, callback: "Callable[[Future[Any]], object]") -> None:
        """Call ``callback`` then, in another thread perhaps."""
        self.answer.add_done_callback(callback)

    def noted(self) -> Step | None:
        """Note the reward and the metrics of the answer; None: the environment has failed."""
        play, answer = play_of(self.episode), self.answer.result()
        at = self.episode.offset + self.episode.num_tokens - 1
        play.wait_s += time.monotonic() - self.asked
        if isinstance(answer, Failure):
            play.failure = answer.cause
            self.player.log_once(answer)
            return None
        if answer.reward is not None:
            earlier = play.rewards.pop()[1] if play.rewards and play.rewards[-1][0] == at else 0.0
            play.rewards.append((at, earlier + answer.reward))
        for name, value in answer.metrics.items():
            play.metrics[name] = play.metrics.get(name, 0.0) + value
        return answer


@dataclass(frozen=True)
class PendingAnswer(Asked):
    """A :class:`~lightrft.rollout.turns.PendingTurn`: the answer to the last turn of ``episode``."""
    drawn: int  # tokens of the turn
    room: int
    cut: bool

    def result(self) -> "Turn | PendingTurn":
        """Note what the environment says, and return what follows the turn; None: the response ends."""
        answer = self.noted()
        if answer is None or answer.done or self.cut or not (answer.messages or answer.text or answer.history):
            return None
        try:
            return self.player.following(self, answer)
        except DataError as error:  # its template or its processor refuses them, or a picture has no place
            play_of(self.episode).failure = "exception"
            self.player.log_once(Failure("exception", str(error)))
            return None


@dataclass(frozen=True)
class PendingLastWord(Asked):
    """A :class:`~lightrft.rollout.turns.PendingTurn`: what the environment says at the end of a response that
    cannot go on with ``turn``, its answer."""
    turn: Turn

    def result(self) -> Turn:
        """Note what the environment says, and return the turn without room, which ends the response."""
        self.noted()
        return self.turn


def play_of(episode: Episode) -> Play:
    """Return the record of an episode with a session."""
    assert episode.play is not None, "its session is open"
    return episode.play
