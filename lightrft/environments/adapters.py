"""Environments that are written for other trainers, recognised by the names of their methods."""
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightrft.environments.base import Info, Message, Step, Task, Turn
from lightrft.environments.tools import ToolBox, ToolEnvironment


class Adapter(NamedTuple):
    """What makes the environment of a response of a user's class, and the description of that."""
    factory: Callable[[], Any]
    info: Info


def adapter_of(cls: type) -> Adapter | None:
    """Return the adapter of a class; None if it has no known interface."""
    matches = (make for fits, make in _KINDS if fits(cls))
    make = next(matches, None)
    return None if make is None else make(cls)


def _has(*methods: str) -> Callable[[type], bool]:
    return lambda cls: all(callable(getattr(cls, method, None)) for method in methods)


def _parameters(cls: type, method: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a method without the object itself."""
    parameters = dict(inspect.signature(getattr(cls, method)).parameters)
    parameters.pop("self", None)
    return parameters


async def awaited(value: Any) -> Any:
    """Return a value, or that of an awaitable."""
    return await value if inspect.isawaitable(value) else value


def _row(prompt: Task) -> dict[str, Any]:
    """Return the columns of a row with its prompt, as TRL passes them."""
    return prompt.columns | {"prompt": prompt.messages or prompt.text, "reference": prompt.reference,
                             "data_source": prompt.data_source, "label": prompt.label}  # yapf: disable


def _native(cls: type) -> Adapter:
    return Adapter(cls, Info("environment", tuple(getattr(cls, "tools", ()) or ())))


class TurnEnvironment:
    """``turn(prompt, response) -> str | None``: the text is appended as it is."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.prompt = inner, Task("", "")

    def reset(self, prompt: Task, seed: int) -> None:
        """Keep the prompt."""
        self.prompt = prompt

    def step(self, turn: Turn) -> Step:
        """Ask for the text behind the response."""
        answer = None if turn.cut else self.inner.turn(self.prompt, turn.response)
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"turn() returned {answer!r}; it returns a text, or None to end the response")
        return Step(text=answer, done=answer is None)


class MethodTools(ToolEnvironment):
    """TRL's ``environment_factory``: the public methods of an object are its tools, with ``schemas`` if they are known.
    """

    def __init__(self, inner: Any, schemas: "list[dict[str, Any]] | None" = None) -> None:
        super().__init__(ToolBox([getattr(inner, name) for name in _tool_names(type(inner))], schemas))
        self.inner = inner

    async def reset(self, prompt: Task, seed: int) -> Any:
        """Pass the row as keywords; a text is a message of the user."""
        row, parameters = _row(prompt), _parameters(type(self.inner), "reset")
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        return await awaited(self.inner.reset(**{key: row[key] for key in row if takes_all or key in parameters}))

    async def step(self, turn: Turn) -> Step:
        """Answer the calls; the last turn has the reward of ``get_reward``."""
        step = await super().step(turn)
        if step.done and hasattr(self.inner, "get_reward"):
            step.reward = await awaited(self.inner.get_reward())
        return step


_NO_TOOLS = ("reset", "get_reward", "close")


def _tool_names(cls: type) -> list[str]:
    """Return the names of the public methods of a class, inherited ones first."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    return [name for name in names if inspect.isfunction(getattr(cls, name)) and not name.startswith("_")
            and name not in _NO_TOOLS]  # yapf: disable


class AgentInstance:
    """OpenRLHF's ``AgentInstance``: states in, rewards and raw text out."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.observation = inner, ""
        self.label: Any = None

    async def reset(self, prompt: Task, seed: int) -> None:
        """Begin with the text of the prompt; the marks of its template are there already."""
        self.label = prompt.label if prompt.reference is None else prompt.reference
        states = await awaited(self.inner.reset({"observation": prompt.text, "label": self.label}))
        self.observation = (states or {}).get("observation", prompt.text)

    async def step(self, turn: Turn) -> Step:
        """Pass the action; the feedback is appended as it is."""
        states = {"observation_text": self.observation, "action_text": turn.text, "label": self.label,
                  "sampling_params": None}  # yapf: disable
        answer = await awaited(self.inner.step(states))
        feedback = answer.get("environment_feedback") or ""
        self.observation += turn.text + feedback
        logs = {key: float(value) for key, value in (answer.get("extra_logs") or {}).items()}
        return Step(text=feedback or None, reward=_number(answer.get("rewards")), metrics=logs,
                    done=bool(answer.get("done", not feedback)))  # yapf: disable


def _number(value: Any) -> float | None:
    """Return a number, also of a tensor with one value or of a list of one."""
    if value is None:
        return None
    value = value.item() if hasattr(value, "item") else value
    return float(value[0] if isinstance(value, (list, tuple)) else value)


class GymText:
    """SkyRL-Gym: ``init(prompt) -> (messages, info)``, ``step(text)`` returns observations, reward, done and metadata.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def reset(self, prompt: Task, seed: int) -> list[Message]:
        """Return the messages that ``init`` adds to those of the prompt."""
        messages, _ = await awaited(self.inner.init(prompt.messages))
        return list(messages)[len(prompt.messages):]

    async def step(self, turn: Turn) -> Step:
        """Pass the text of a turn."""
        answer = await awaited(self.inner.step(turn.text))
        return Step(list(answer["observations"]), _number(answer.get("reward")), bool(answer["done"]),
                    {key: float(value) for key, value in (answer.get("metadata") or {}).items()
                     if isinstance(value, (int, float))})  # yapf: disable

    async def close(self) -> None:
        """Close the inner environment."""
        if hasattr(self.inner, "close"):
            await awaited(self.inner.close())


def _wrapped(kind: str, adapter: type, writes_marks: bool = False) -> Callable[[type], Adapter]:
    return lambda cls: Adapter(lambda: adapter(cls()), Info(kind, writes_marks=writes_marks))


def _of_methods(cls: type) -> Adapter:
    schemas = MethodTools(cls()).box.schemas  # read once, and not for every response
    return Adapter(lambda: MethodTools(cls(), schemas), Info("environment_factory", tuple(schemas)))


def _is_native(cls: type) -> bool:
    return _has("reset", "step")(cls) and "seed" in _parameters(cls, "reset") and "turn" in _parameters(cls, "step")


def _is_agent(cls: type) -> bool:
    return _has("reset", "step")(cls) and "states" in _parameters(cls, "step")


def _has_tools(cls: type) -> bool:
    return _has("reset")(cls) and not hasattr(cls, "step") and bool(_tool_names(cls))


_KINDS: list[tuple[Callable[[type], bool], Callable[[type], Adapter]]] = [
    (_is_native, _native),
    (_has("turn"), _wrapped("turn", TurnEnvironment, writes_marks=True)),
    (_is_agent, _wrapped("AgentInstance", AgentInstance, writes_marks=True)),
    (_has("init", "step"), _wrapped("skyrl", GymText)),
    (_has_tools, _of_methods),
]
