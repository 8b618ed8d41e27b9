"""Input and output of a reward. Nothing here imports torch: worker processes import this module."""
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightrft.config.foreign_values import MANAGERS
from lightrft.utils.play import Play
from lightrft.utils.registry import Registry
from lightrft.utils.score import Score  # noqa: F401  (what a reward manager makes of outcomes)

# causes of unscored responses that lie in a server or a worker, not in the response: a later try may have a score
TRANSIENT = ("unreachable", "http_status", "timeout", "worker_died", "shutdown")
LARGEST = 1e15  # size of a reward: float32 holds sums of the squares of larger ones no more, and advantages become 0


class ResponseFault(Exception):
    """Raised by a reward whose response is to blame, such as a program that crashes: its reward is 0, not unscored.

    A function of lists returns one in the place of a number. A class of this name in a reward file is the same.
    """


def is_response_fault(error: BaseException | None) -> bool:
    """Return True for a :class:`ResponseFault`, a class of that name, or a group of such exceptions alone."""
    nested = getattr(error, "exceptions", ())  # of an exception group, from Python 3.11 on
    if isinstance(nested, tuple) and nested:
        return all(map(is_response_fault, nested))
    return any(cls.__name__ == ResponseFault.__name__ for cls in type(error).__mro__)


@dataclass(frozen=True)
class RewardInput:
    """One response with all data of its row.

    Attributes:
        response: what the policy drew. It never contains the prompt, nor what an environment wrote between two turns,
            which are joined by :data:`~lightrft.utils.play.BETWEEN`.
        media: keys of those in the messages, in order.
        template_kwargs: for the chat template of a model that renders the messages.
        model_rewards: scores of the reward models by name, for a function that reads them.
        play: what an environment did in the response.
        group_id: number of the prompt, where responses to several are scored together.
    """
    prompt: str
    response: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    data_source: str = ""
    label: str = ""
    reference: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    media: tuple[str, ...] = ()
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    model_rewards: dict[str, float | None] = field(default_factory=dict)
    play: Play | None = None
    group_id: int = 0

    @property
    def turns(self) -> list[dict[str, Any]]:
        """Messages of the response, with their roles: one of the assistant without an environment."""
        return [{"role": "assistant", "content": self.response}] if self.play is None else self.play.messages

    @property
    def answers(self) -> list[str]:
        """Texts of the turns of the policy; one without an environment."""
        return [self.response] if self.play is None else self.play.answers

    @property
    def group(self) -> tuple[int, str, tuple[str, ...]]:
        """Key of the prompt: adjacent responses with the same one are a group."""
        return self.group_id, self.prompt, self.media


class JudgedRow(Protocol):
    """Fields that the choice of rewards reads: of a :class:`RewardInput`, or of a prompt without a response."""

    @property
    def label(self) -> str:
        """Name of a recipe of rewards, or empty."""

    @property
    def data_source(self) -> str:
        """Name of the data, or empty."""

    @property
    def columns(self) -> dict[str, Any]:
        """Other columns of the row."""


@dataclass(frozen=True)
class Outcome:
    """Result of one reward part for one response: a ``value``, or None with ``error`` (a short, countable cause).

    ``detail`` is for people (a traceback, a server's answer); ``extra`` holds further numbers for the metrics.
    ``steps``, where each step has a reward of its own: the character of the response that follows the step, and the
    reward; ``value`` is their sum. ``fault``: cause for which the response itself is to blame.
    """
    value: float | None
    error: str | None = None
    detail: str = ""
    extra: dict[str, float] = field(default_factory=dict)
    steps: tuple[tuple[int, float], ...] = ()
    fault: str = ""


class Reward(Protocol):
    """One reward part, a batch at a time: a number per response, None where it cannot judge."""

    def __call__(self, batch: list[RewardInput]) -> list[float | None]:
        """Return scores in the order of ``batch``."""


REWARDS: Registry[Reward] = Registry("reward", {"accuracy": "math", "accuracy_reward": "math"}
                                     | MANAGERS)  # TRL, ms-swift; verl, Skywork-OR1
