"""Tools and interactions of verl. Both are one object for all responses, which tell it their own instance."""
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from lightrft.environments.base import Message, Step, Task, ToolCall, Turn
from lightrft.environments.interop import called, extra_info, number, numbers, taken
from lightrft.environments.tools import Answered, told, ToolBox, ToolEnvironment
from lightrft.utils.errors import CaptureException, first_line, UserError


@dataclass
class AgentData:
    """State that the tools of a response share: ``execute`` gets it as ``agent_data``, under the names of verl.

    Attributes:
        messages: of the prompt, of the turns so far with the present one, and of the answers to them.
        tools_kwargs: of the row, by the name of the tool.
        tool_rewards: of the calls so far.
        extra_fields: for what a tool keeps.
    """
    request_id: str
    messages: list[Message]
    tools_kwargs: dict[str, Any]
    tool_rewards: list[float] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)


class VerlToolBox(ToolBox):
    """Tools of verl by name: ``create``, ``execute``, ``calc_reward`` and ``release``."""

    def __init__(self, tools: Sequence[Any]) -> None:
        super().__init__([tool.execute for tool in tools], [_schema(tool) for tool in tools])
        self.objects = dict(zip(self.tools, tools))


class VerlTools(ToolEnvironment):
    """Tools with an instance each for the response, from ``extra_info.tools_kwargs[NAME].create_kwargs`` of the row,
    where other methods may have keywords too (``execute_kwargs``).

    A turn has the sum of the rewards of its calls; the last one has what ``calc_reward`` gives too.
    """

    def __init__(self, box: VerlToolBox) -> None:
        super().__init__(box)
        self.objects, self.instances = box.objects, dict[str, str]()
        self.shared = AgentData("", [], {})

    async def reset(self, prompt: Task, seed: int) -> None:
        """Create an instance of each tool."""
        self.shared = AgentData(str(uuid4()), [*prompt.messages], extra_info(prompt).get("tools_kwargs") or {})
        for name, tool in self.objects.items():
            given = self._kwargs(name, "create")
            created = await tool.create(str(uuid4()), **taken(tool.create, given | {"create_kwargs": given}))
            self.instances[name] = created[0] if isinstance(created, tuple) else created

    async def step(self, turn: Turn) -> Step:
        """Answer the calls of a turn."""
        self.shared.messages.append(turn.message)
        step = await super().step(turn)
        self.shared.messages += step.messages if isinstance(step.messages, list) else []
        if step.done or turn.last:
            step.reward = (step.reward or 0.0) + await self._reward()
        return step

    async def cut_short(self) -> Step:
        """Ask for the rewards at the end."""
        return Step(reward=await self._reward())

    def _kwargs(self, name: str, method: str) -> dict[str, Any]:
        """Return the keywords that a row has for a method of a tool."""
        return (self.shared.tools_kwargs.get(name) or {}).get(f"{method}_kwargs") or {}

    async def _reward(self) -> float:
        rewards = [await tool.calc_reward(self.instances[name], **self._kwargs(name, "calc_reward"))
                   for name, tool in self.objects.items()]  # yapf: disable
        return sum(number(reward) or 0.0 for reward in rewards)

    async def answer(self, call: ToolCall) -> Answered:
        """Execute a call; its reward is one of the turn. An error that a tool raises is told to the policy, as verl
        does."""
        if problem := self.box.problem(call):
            return Answered(f"Error: {problem}", False)
        execute = self.objects[call.name].execute
        with CaptureException() as captured:
            response, reward, metrics = await execute(
                self.instances[call.name], call.arguments,
                **taken(execute, {"agent_data": self.shared}) | self._kwargs(call.name, "execute"))
        if captured.cause is not None:
            return told(captured.cause, f"Error executing tool {call.name!r}: {captured.cause}")
        if reward is not None:
            self.shared.tool_rewards.append(reward)
        text = response if isinstance(response, str) else getattr(response, "text", None) or ""
        shown = [{"type": kind, kind: each} for kind in ("image", "video")
                 for each in getattr(response, kind, None) or () if each is not None]
        content = [*shown, {"type": "text", "text": text}] if shown else text
        return Answered(content, True, number(reward), numbers(metrics))

    async def close(self) -> None:
        """Release the instances."""
        for name, instance in self.instances.items():
            await self.objects[name].release(instance, **self._kwargs(name, "release"))


def made(cls: type) -> Any:
    """Return a tool of a class: with the schema that it has itself, and without configuration.

    Raises:
        UserError: it cannot be made so.
    """
    with CaptureException() as captured:
        return cls(**taken(cls, {"config": {}, "tool_schema": None}))
    raise UserError(
        f"the tool {cls.__name__} of verl cannot be made without a configuration and a schema "
        f"({first_line(captured.cause or ValueError())}). Make it in the file, as tools = [{cls.__name__}(config, "
        "tool_schema)], or give it a method get_openai_tool_schema()")


def _schema(tool: Any) -> dict[str, Any]:
    schema = getattr(tool, "tool_schema", None) or tool.get_openai_tool_schema()
    return schema if isinstance(schema, dict) else schema.model_dump(exclude_unset=True, exclude_none=True)


class VerlInteraction:
    """An interaction of verl: ``generate_response(instance, messages)`` returns whether the conversation is over, what
    the user says, a reward and metrics. It begins with ``extra_info.interaction_kwargs`` of the row."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.instance, self.kwargs = inner, "", dict[str, Any]()
        self.messages: list[Message] = []

    async def reset(self, prompt: Task, seed: int) -> None:
        """Start the interaction."""
        self.messages, self.kwargs = [*prompt.messages], extra_info(prompt).get("interaction_kwargs") or {}
        self.instance = await self.inner.start_interaction(str(uuid4()), **self.kwargs)

    async def step(self, turn: Turn) -> Step:
        """Pass all messages, with the turn at their end."""
        self.messages.append({"role": "assistant", "content": turn.text})
        over, text, reward, metrics = await self.inner.generate_response(self.instance, self.messages, **self.kwargs)
        self.messages.append({"role": "user", "content": text})
        return Step(text, number(reward), bool(over), numbers(metrics))

    async def close(self) -> None:
        """Finish the interaction."""
        finish = getattr(self.inner, "finalize_interaction", None)
        if finish is not None:  # that of verl's base class takes no instance
            await called(finish, *[self.instance] * bool(inspect.signature(finish).parameters))
