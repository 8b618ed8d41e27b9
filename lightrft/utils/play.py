"""Record of what an environment did in one response. Nothing here imports torch: worker processes import this module.
"""
from dataclasses import dataclass, field, replace
from typing import Any

BETWEEN = "\n"  # turns of the policy, where they are read as one text
NO_START = "no_room_at_start"  # the messages of ``reset`` are too long for the prompt, or have too many pictures
FAILURES = ("timeout", "exception", "worker_died", NO_START)
"""Causes for which an environment is to blame: they leave a response without a reward."""
LIMITS = ("no_room", "max_turns", "open_thought")
"""Causes that end a response early without a fault: it is scored as it stands."""


@dataclass(frozen=True, eq=False)
class Shown:
    """Picture that an environment has shown: its ``key`` as a medium, and its encoded bytes in base64. Who reads the
    medium by its key needs this object: the store of media keeps no picture that nobody has."""
    key: str
    data: str = field(repr=False)


@dataclass
class Play:
    """Record of the turns of an environment and a policy in one response.

    Attributes:
        messages: turns with their roles, those of the policy as it drew them.
        parsed: the turns of the policy as chat messages, whose thoughts and calls of tools are apart; empty where the
            environment reads text.
        rewards: of turns: the index in the sequence of the last token that the policy drew in the turn, and the reward.
        failure: cause for which the environment gave no answer; the response is left unscored then.
        limit: cause that ended the response early without a fault.
        turns, calls: of the policy; ``wait_s``: seconds in which the response waited for answers.
        restarts: times that the response began again, because its environment was lost with an earlier process, and
            answered otherwise when its turns were played again.
        replays: turns that were played again in a new environment, which answered in the same way.
        metrics: sums of the numbers that the environment gave.
        seed: of the environment; a response that begins again has the same.
        asked: messages, text, tokens and media of the prompt before the environment added to it; None: it added
            nothing.
        shown: pictures of the environment, those of the prompt first.
    """
    messages: list[dict[str, Any]] = field(default_factory=list)
    parsed: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    failure: str = ""
    limit: str = ""
    turns: int = 0
    calls: int = 0
    wait_s: float = 0.0
    restarts: int = 0
    replays: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    asked: dict[str, Any] | None = None
    shown: list[Shown] = field(default_factory=list)

    @classmethod
    def load(cls, state: "dict[str, Any] | None") -> "Play | None":
        """Restore a record from the plain values of a checkpoint."""
        if state is None:
            return None
        rewards = [(at, reward) for at, reward in state["rewards"]]
        return cls(**state | {"rewards": rewards, "shown": [Shown(**one) for one in state.get("shown", ())]})

    @property
    def answers(self) -> list[str]:
        """Texts that the policy drew: its turns, without what the environment wrote."""
        return [message["content"] for message in self.messages if message["role"] == "assistant"]

    def begun_with(self, text: str) -> "Play":
        """Return the record with ``text`` before the first turn: the start of the answer that a prompt ends with."""
        first, *others = self.messages or [{"role": "assistant", "content": ""}]
        return replace(self, messages=[first | {"content": text + first["content"]}, *others])

    @property
    def reward(self) -> float | None:
        """Sum of the rewards of the turns; None if no turn had one."""
        return sum(reward for _, reward in self.rewards) if self.rewards else None
