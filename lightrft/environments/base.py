"""Contract of environments. Nothing here imports torch: worker processes import this module."""
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightrft.utils.registry import Registry

Message = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Row of the data, as an environment reads it: the fields of :class:`lightrft.types.Prompt` that are no tokens; and
    of the run ``env_images``, the most pictures that it may show in the response, and ``max_turns``, the most turns of
    the policy."""
    uid: str
    text: str
    messages: list[Message] = field(default_factory=list)
    data_source: str = ""
    label: str = ""
    reference: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    env_images: int = 0
    max_turns: int = 1


@dataclass(frozen=True)
class ToolCall:
    """Call of a tool in a turn. ``error`` says why it cannot be made ("" if it can), such as arguments that are no
    JSON; ``raw`` is what the policy wrote."""
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    raw: str = ""


@dataclass(frozen=True)
class Turn:
    """One turn of the policy.

    Attributes:
        text: what it drew, with calls and thoughts, without special tokens at its end.
        calls: the calls of tools in it, in order.
        message: the turn as a chat message, whose thoughts and calls are apart.
        number: of the turn in the response, from 0 on.
        room: tokens that the response may still have.
        cut: the turn was cut by the limit on tokens; it is the last one.
        response: the whole response, with earlier turns and answers, for an environment whose interface reads it
            (:attr:`Info.reads_response`); else "".
        last: no turn follows, whatever the answer: this one was cut, or is the last of ``--max_turns``.
    """
    text: str
    calls: tuple[ToolCall, ...] = ()
    message: Message = field(default_factory=dict)
    number: int = 0
    room: int = 0
    cut: bool = False
    response: str = ""
    last: bool = False


@dataclass
class Step:
    """Answer of an environment to a turn.

    Attributes:
        messages: that the policy reads next. A text is a message of the user; None, or no message, ends the response.
        reward: of the turn; None: it has none.
        done: the response ends with this turn; its messages are dropped.
        metrics: numbers of the turn by name; those of a response are added.
        text: is appended as it is, in place of messages: it has the marks of the template itself.
        images: pictures for which the text has placeholders of the model.
        history: the whole conversation from now on, in place of all that was said, the messages of the prompt included,
            and of ``messages``. What the policy drew before stays a part of its response.
    """
    messages: list[Message] | str | None = None
    reward: float | None = None
    done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    text: str | None = None
    images: list[Any] = field(default_factory=list)
    history: list[Message] | None = None


class Environment(Protocol):
    """Environment of one response, such as a game, or tools with their state.

    An object is made for each response, in a worker process. Its methods may be ``async``; others run in a thread that
    is the object's own. ``close()`` is optional. So is ``cut_short() -> Step``: it is called when a
    response ends without room for the answer to its last turn, for a reward that is given at the end alone.
    """

    def reset(self, prompt: Task, seed: int) -> "list[Message] | str | None | Awaitable[Any]":
        """Begin; return messages that follow those of the prompt, if any.

        Args:
            seed: the same for all responses to a prompt, and another one in each step of the training.
        """

    def step(self, turn: Turn) -> "Step | Awaitable[Step]":
        """Answer a turn."""


ENVIRONMENTS: Registry[Callable[[], Any]] = Registry("environment")
"""Name -> what makes the environment of a response: a class, say."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """Source of an environment, which a worker loads: a file (and a name in it), or a pickled class, function or list
    of functions."""
    path: str = ""
    name: str = ""
    pickled: bytes = b""

    @property
    def title(self) -> str:
        """The environment in messages."""
        return f"{self.path}{':' if self.path and self.name else ''}{self.name}"


@dataclass(frozen=True)
class Info:
    """Description of an environment by its worker: its interface, the schemas of its tools, whether it answers with
    text that has the marks of the template, whether every turn has to bring the whole response, and whether a message
    of the user at its start continues the one that the prompt ends with."""
    kind: str
    tools: tuple[dict[str, Any], ...] = ()
    writes_marks: bool = False
    reads_response: bool = False
    continues_prompt: bool = False


@dataclass(frozen=True)
class Failure:
    """An environment that did not answer: one of :data:`~lightrft.utils.play.FAILURES`, and a text for people; or
    ``refused``, for what ends the run."""
    cause: str
    detail: str = ""


_DESCRIBE = "Let it describe what it shows, or put the medium into the prompt of the row"


class UnreadMedia(TypeError):
    """An environment answers with a video or a sound, which are no part of observations, or with an array that is no
    picture as it is: the run ends.

    Args:
        kind: of the medium.
        remedy: what to do, as a sentence.
    """

    def __init__(self, kind: str, remedy: str = _DESCRIBE) -> None:
        super().__init__(f"an environment answered with {kind}, and observations are texts and pictures. {remedy}")
