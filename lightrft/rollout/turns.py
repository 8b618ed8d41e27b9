"""Turns: what a response is given behind a stop token, at once or later: tokens, or another prompt."""
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lightrft.types import Episode, Prompt, Segment

Given = list[int] | Segment  # tokens that are appended to a response
Turn = Given | Prompt | None
"""Tokens, perhaps with media, behind which a response resumes; a prompt, behind which it goes on in another branch; or
None: it is finished."""
TURNS = (list, Segment, Prompt, type(None))  # types of a turn; to ask for a protocol takes 200 times as long


class PendingTurn(Protocol):
    """A turn that may not be there yet, such as a :class:`concurrent.futures.Future`."""

    def done(self) -> bool:
        """Return True once the turn is there."""

    def result(self) -> "Turn | PendingTurn":
        """Return the turn, or another one that is waited for in its place; or raise the error that it met."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Let ``callback`` be called once the turn is there, in any thread."""


NextTurn = Callable[[list[Episode]], Sequence[Turn | PendingTurn]]


def is_there(turn: Turn | PendingTurn) -> bool:
    """Return True for a turn that nobody has to wait for."""
    return isinstance(turn, TURNS) or turn.done()


def result_of(turn: Turn | PendingTurn) -> Turn:
    """Return a turn, after a wait if it is not there."""
    while not isinstance(turn, TURNS):
        turn = turn.result()
    return turn
