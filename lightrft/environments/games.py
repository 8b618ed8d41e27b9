"""Games that read an action and show what they see: gymnasium, textarena, the Gym of ms-swift, rLLM."""
import json
import re
from collections.abc import Callable
from typing import Any

from lightrft.environments.base import Message, Step, Task, Turn, UnreadMedia
from lightrft.environments.interop import called, extra_info, MadePerRow, number, numbers, row_of
from lightrft.environments.observations import is_frame, parts_of

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # colours of a terminal
_FRAME = "Let observe() return it as PIL.Image.fromarray(frame), with --env_images N, or describe it"


class GymnasiumGame:
    """A ``gymnasium.Env`` or ``Wrapper`` with ``act(text)``: it returns the action that a text means, or None.

    What the policy reads is what ``render()`` writes with the render mode "ansi", or shows with "rgb_array" if pictures
    may be shown, else the observation: a frame as a picture, others as text. An optional ``observe(observation)``
    writes or shows another one.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.modes: tuple[str, ...] = ("ansi", )

    def reset(self, prompt: Task, seed: int) -> str | list[Message]:
        """Begin with the seed; return the first observation."""
        self.modes = ("ansi", "rgb_array") if prompt.env_images else ("ansi", )
        observation, _ = self.inner.reset(seed=seed)
        return self._shown(observation)

    def step(self, turn: Turn) -> Step:
        """Pass the action of a turn. A text that means none is told, and costs a turn."""
        action = self.inner.act(turn.text)
        if action is None:
            return Step("This is no action.", 0.0, metrics={"wrong_actions": 1.0})
        observation, reward, terminated, truncated, _ = self.inner.step(action)
        return Step(self._shown(observation), number(reward), bool(terminated or truncated),
                    {"wrong_actions": 0.0})  # yapf: disable

    def close(self) -> None:
        """Close the game."""
        self.inner.close()

    def _shown(self, observation: Any) -> str | list[Message]:
        shown = observation
        if hasattr(self.inner, "observe"):
            shown = self.inner.observe(observation)
        elif getattr(self.inner, "render_mode", None) in self.modes:
            shown = self.inner.render()
        parts = parts_of(shown)
        if not parts and is_frame(shown):
            raise UnreadMedia(f"an array {shown.dtype} {[*shown.shape]}", _FRAME)
        return [{"role": "user", "content": parts}] if parts else _ANSI.sub("", str(shown)).strip()


class TextArenaGame:
    """A game of textarena for one player: its reward comes when it ends, and after the last turn.

    ``get_observation`` returns all texts so far; the policy reads what is new.
    """

    def __init__(self, inner: Any) -> None:
        self.inner, self.seen = inner, ""

    def reset(self, prompt: Task, seed: int) -> str:
        """Begin with the seed; return the rules."""
        self.inner.reset(num_players=1, seed=seed)
        return self._new()

    def step(self, turn: Turn) -> Step:
        """Pass the text of a turn."""
        over = turn.cut or self.inner.step(action=turn.text)[0] or turn.last
        new = "" if over else self._new()
        return Step(new) if new else self.cut_short()

    def cut_short(self) -> Step:
        """End the game, as far as it came."""
        rewards, _ = self.inner.close()
        return Step(reward=number((rewards or {}).get(0, 0.0)), done=True)

    def _new(self) -> str:
        _, text = self.inner.get_observation()
        new, self.seen = text[len(self.seen):] if text.startswith(self.seen) else text, text
        return new.strip()


class SwiftGym(MadePerRow):
    """The Gym of ms-swift: ``reset(config) -> (text, info, system message)``, ``step(messages) -> (text, reward, done,
    info)``. ``config`` has ``messages`` and ``data_dict``: the row, whose ``env_config`` the constructor takes, or that
    of its ``extra_info``."""

    def __init__(self, cls: Callable[..., Any]) -> None:
        super().__init__(cls)
        self.messages = list[Message]()

    async def reset(self, prompt: Task, seed: int) -> Step:
        """Make the environment of the row; its messages take the place of those of the prompt."""
        row = row_of(prompt)
        self.inner = await called(self.cls, row.get("env_config") or extra_info(prompt).get("env_config") or {})
        text, _, system = await called(self.inner.reset, SwiftRequest(prompt.messages, row))
        self.messages = [{"role": "system", "content": system}] if system else []
        self.messages += [{"role": "user", "content": text}] if text else prompt.messages
        return Step(history=[*self.messages])

    async def step(self, turn: Turn) -> Step:
        """Pass all messages; a dict or a list that it shows is written as JSON."""
        self.messages.append({"role": "assistant", "content": turn.text})
        text, reward, done, info = await called(self.inner.step, self.messages)
        self.messages.append({"role": "user", "content": shown(text)})
        return Step(shown(text), number(reward), bool(done), numbers(info))


class SwiftRequest:
    """Fields of a ``RolloutInferRequest`` that ``reset`` of ms-swift reads."""

    def __init__(self, messages: list[Message], data: dict[str, Any]) -> None:
        self.messages, self.data_dict = [*messages], data


class RllmGame(MadePerRow):
    """An environment of rLLM: ``from_dict(row)``, ``reset() -> (observation, info)``, ``step(text) -> (observation,
    reward, done, info)``."""

    async def reset(self, prompt: Task, seed: int) -> str:
        """Make the environment of the row; an observation that is a text follows the prompt, for others are the row."""
        self.inner = await called(self.cls.from_dict, row_of(prompt))
        observation, _ = await called(self.inner.reset)
        return observation if isinstance(observation, str) else ""

    async def step(self, turn: Turn) -> Step:
        """Pass the text of a turn."""
        observation, reward, done, info = await called(self.inner.step, turn.text)
        return Step(shown(observation), number(reward), bool(done), numbers(info))


def shown(observation: Any) -> str:
    """Write an observation: a text as it is, anything else as JSON."""
    return observation if isinstance(observation, str) else json.dumps(observation, default=str)
