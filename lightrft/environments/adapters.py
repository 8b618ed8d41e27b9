"""Environments that are written for other trainers, recognised by the names of their methods."""
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightrft.environments.base import Info, Message, Step, Task, ToolCall, Turn
from lightrft.environments.games import GymnasiumGame, RllmGame, SwiftGym, TextArenaGame
from lightrft.environments.interop import (called, closed, dataclass_in_hint, MadePerRow, number, numbers, parameters,
                                           row_of, taken)
from lightrft.environments.tools import Answered, schema_of, told, ToolBox, ToolEnvironment
from lightrft.environments.verl import made, VerlInteraction, VerlToolBox, VerlTools
from lightrft.utils.errors import CaptureException, UserError


class Adapter(NamedTuple):
    """Factory of the environment of a response, of a user's class, and the description of that."""
    factory: Callable[[], Any]
    info: Info


def adapter_of(cls: type) -> Adapter | None:
    """Return the adapter of a class; None if it has no known interface.

    Raises:
        UserError: no object of it can be made, or the schema of a tool.
    """
    make = interface_of(cls)
    return None if make is None else make(cls)


def interface_of(cls: type) -> Callable[[type], Adapter] | None:
    """Return what makes the adapter of a class; None if it has no known interface."""
    return next((make for fits, make in _KINDS if fits(cls)), None)


def _has(*methods: str) -> Callable[[type], bool]:
    return lambda cls: all(callable(getattr(cls, method, None)) for method in methods)


def _native(cls: type) -> Adapter:
    _check_made(cls)
    return Adapter(cls, Info("environment", tuple(_schemas(cls))))


def _schemas(cls: type) -> list[dict[str, Any]]:
    """Return the schemas in the list ``tools`` of a class; those of functions in it are made.

    Raises:
        UserError: it is no list, or something in it is no schema.
    """
    tools = getattr(cls, "tools", None) or []
    listed = isinstance(tools, (list, tuple))
    schemas = [schema_of(tool) if callable(tool) else tool for tool in tools] if listed else []
    if not listed or not all(map(_is_schema, schemas)):
        raise UserError(
            f"the tools of the environment {cls.__name__} are {tools!r}: expected a list of functions with docstrings, "
            "or of schemas {'type': 'function', 'function': {'name': ..., 'description': ..., 'parameters': ...}}")
    return schemas


def _is_schema(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


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

    They share the state of the object, so those of a turn are called one after another, as TRL does; ``async`` ones run
    at the same time.
    """

    def __init__(self, inner: Any, schemas: "list[dict[str, Any]] | None" = None) -> None:
        super().__init__(ToolBox([getattr(inner, name) for name in _tool_names(type(inner))], schemas, called))
        self.inner = inner

    async def reset(self, prompt: Task, seed: int) -> Any:
        """Pass the row as keywords; a text, or a list of parts, continues the last message of the user."""
        value = await called(self.inner.reset, **taken(self.inner.reset, row_of(prompt)))
        return [{"role": "user", "content": value}] if value and isinstance(value, list) else value

    async def answer(self, call: ToolCall) -> Answered:
        """Answer one call. An error that a method raises is told to the policy, as TRL does: "Game over", say."""
        with CaptureException() as captured:
            return await super().answer(call)
        return told(captured.cause, json.dumps({"error": str(captured.cause)}, ensure_ascii=False))

    async def step(self, turn: Turn) -> Step:
        """Answer the calls; the last turn has the reward of ``get_reward``."""
        step = await super().step(turn)
        if step.done or turn.last:
            step.reward = (await self.cut_short()).reward
        return step

    async def close(self) -> None:
        """Close the object, if it has such a method."""
        await closed(self.inner)

    async def cut_short(self) -> Step:
        """Ask for the reward."""
        return Step(reward=await called(self.inner.get_reward) if hasattr(self.inner, "get_reward") else None)


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

    async def reset(self, prompt: Task, seed: int) -> Step | None:
        """Begin with the text of the prompt, which has the marks of its template; another observation takes its place.
        """
        self.label = prompt.label if prompt.reference is None else prompt.reference
        states = await called(self.inner.reset, {"observation": prompt.text, "label": self.label})
        self.observation = (states or {}).get("observation", prompt.text)
        return None if self.observation == prompt.text else Step(text=self.observation)

    async def step(self, turn: Turn) -> Step:
        """Pass the action; the feedback is appended as it is, and its marks of pictures stand for those of
        ``environment_images``."""
        states = {"observation_text": self.observation, "action_text": turn.text, "label": self.label,
                  "sampling_params": None}  # yapf: disable
        answer = await called(self.inner.step, states)
        feedback = answer.get("environment_feedback") or ""
        self.observation += turn.text + feedback
        return Step(text=feedback or None, reward=number(answer.get("rewards")),
                    metrics=numbers(answer.get("extra_logs")), done=bool(answer.get("done", not feedback)),
                    images=list(answer.get("environment_images") or ()))  # yapf: disable


class GymText(MadePerRow):
    """SkyRL-Gym: ``init(prompt) -> (messages, info)``, ``step(text)`` returns observations, reward, done and metadata.

    A constructor may take ``env_config``: the defaults of the dataclass that its hint names; and ``extras``: the row,
    with ``reward_spec.ground_truth`` and ``max_turns``. What ``get_metrics()`` gives is that of the whole response.
    """

    def __init__(self, cls: Callable[..., Any]) -> None:
        super().__init__(cls)
        self.messages = list[Message]()  # the list that ``init`` returned: the environment may keep it, and change it

    async def reset(self, prompt: Task, seed: int) -> list[Message] | Step:
        """Make the environment of the row. ``init`` adds messages to those of the prompt, or writes others."""
        extras = {"reward_spec": {"ground_truth": prompt.reference}, "max_turns": prompt.max_turns} | row_of(prompt)
        config = dataclass_in_hint(self.cls, "env_config")
        self.inner = await called(self.cls, **taken(self.cls, {"env_config": config(), "extras": extras}))
        self.messages, _ = await called(self.inner.init, [*prompt.messages])
        size = len(prompt.messages)
        same = self.messages[:size] == prompt.messages
        return self.messages[size:] if same else Step(history=[*self.messages])

    async def step(self, turn: Turn) -> Step:
        """Pass the text of a turn. Where the environment has changed earlier messages, these are written anew."""
        before = [*self.messages]
        answer = await called(self.inner.step, turn.text)
        observations, changed = list(answer["observations"]), self.messages != before
        self.messages += [turn.message or {"role": "assistant", "content": turn.text}, *observations]
        step = Step(None if changed else observations, number(answer.get("reward")),
                    bool(answer["done"]) or not observations, numbers(answer.get("metadata")),
                    history=[*self.messages] if changed and observations else None)  # yapf: disable
        if step.done or turn.last:
            step.metrics |= (await self.cut_short()).metrics
        return step

    async def cut_short(self) -> Step:
        """Ask for the metrics of the whole response."""
        asked = getattr(self.inner, "get_metrics", None)
        return Step(metrics=numbers(await called(asked)) if asked is not None else {})


def _wrapped(kind: str, adapter: type, writes_marks: bool = False,
             reads_response: bool = False) -> Callable[[type], Adapter]:
    info = Info(kind, writes_marks=writes_marks, reads_response=reads_response)

    def made_of(cls: type) -> Adapter:
        _check_made(cls)
        return Adapter(lambda: adapter(cls()), info)

    return made_of


def _check_made(cls: type) -> None:
    """Raise a :class:`UserError` if no object of a class can be made without arguments."""
    needed = [
        name for name, each in inspect.signature(cls).parameters.items()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if needed:
        raise UserError(
            f"the environment {cls.__name__} needs {', '.join(needed)}, and an object of it is made for each "
            "response without arguments. Give them defaults, or a subclass that sets them")


def _made_per_row(kind: str, adapter: Callable[[Any], Any]) -> Callable[[type], Adapter]:
    """Return the adapter of classes whose objects are made of a row."""
    return lambda cls: Adapter(lambda: adapter(cls), Info(kind))


def of_methods(cls: type) -> Adapter:
    """Return the adapter of TRL's ``environment_factory``, whose interface any class with ``reset`` and methods has."""
    _check_made(cls)
    schemas = MethodTools(cls()).box.schemas  # read once, and not for every response
    return Adapter(lambda: MethodTools(cls(), schemas),
                   Info("environment_factory", tuple(schemas), continues_prompt=True))


def _is_native(cls: type) -> bool:
    return _has("reset", "step")(cls) and "seed" in parameters(cls, "reset") and "turn" in parameters(cls, "step")


def _is_agent(cls: type) -> bool:
    names = {"states", "state_dict"}  # those of OpenRLHF's examples, and of its base class
    return _has("reset", "step")(cls) and bool(names & parameters(cls, "step").keys())


def _is_swift(cls: type) -> bool:
    return _has("reset", "step")(cls) and "env_config" in inspect.signature(cls).parameters


def verl_tools(tools: Sequence[Any]) -> Adapter:
    """Return the adapter of tools of verl, which are objects."""
    box = VerlToolBox(tools)
    return Adapter(lambda: VerlTools(box), Info("verl tools", tuple(box.schemas)))


def _verl_interaction(cls: type) -> Adapter:
    interaction = cls(**taken(cls, {"config": {}}))
    return Adapter(lambda: VerlInteraction(interaction), Info("verl interaction"))


def _has_tools(cls: type) -> bool:
    return _has("reset")(cls) and not hasattr(cls, "step") and bool(_tool_names(cls))


is_verl_tool = _has("create", "execute", "calc_reward", "release")
_KINDS: list[tuple[Callable[[type], bool], Callable[[type], Adapter]]] = [
    (_is_native, _native),
    (_has("turn"), _wrapped("turn", TurnEnvironment, writes_marks=True, reads_response=True)),
    (_is_agent, _wrapped("AgentInstance", AgentInstance, writes_marks=True)),
    (_has("init", "step"), _made_per_row("skyrl", GymText)),
    (is_verl_tool, lambda cls: verl_tools([made(cls)])),
    (_has("start_interaction", "generate_response"), _verl_interaction),
    (_has("reset", "step", "act"), _wrapped("gymnasium", GymnasiumGame)),
    (_has("reset", "step", "get_observation"), _wrapped("textarena", TextArenaGame)),
    (_has("reset", "step", "from_dict"), _made_per_row("rllm", RllmGame)),
    (_is_swift, _made_per_row("ms-swift gym", SwiftGym)),
    (_has_tools, of_methods),
]
