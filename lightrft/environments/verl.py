"""Tools and interactions of verl. Both are one object for all responses, which tell it their own instance."""
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from lightrft.environments.base import Message, Step, Task, ToolCall, Turn
from lightrft.environments.interop import called, extra_info, number, numbers, taken
from lightrft.environments.tools import Answered, told, ToolBox, ToolEnvironment
from lightrft.utils.errors import CaptureException


class VerlToolBox(ToolBox):
    """Tools of verl by name: ``create``, ``execute``, ``calc_reward`` and ``release``."""

    def __init__(self, tools: Sequence[Any]) -> None:
        super().__init__([tool.execute for tool in tools], [_schema(tool) for tool in tools])
        self.objects = dict(zip(self.tools, tools))


class VerlTools(ToolEnvironment):
    """Tools with an instance each for the response, from ``extra_info.tools_kwargs[NAME].create_kwargs`` of the row.

    A turn has the sum of the rewards of its calls; the last one has what ``calc_reward`` gives too.
    """

    def __init__(self, box: VerlToolBox) -> None:
        super().__init__(box)
        self.objects, self.instances = box.objects, dict[str, str]()
        self.metrics: dict[str, float] = {}

    async def reset(self, prompt: Task, seed: int) -> None:
        """Create an instance of each tool."""
        kwargs = extra_info(prompt).get("tools_kwargs") or {}
        for name, tool in self.objects.items():
            given = (kwargs.get(name) or {}).get("create_kwargs") or {}
            made = await tool.create(str(uuid4()), **taken(tool.create, given | {"create_kwargs": given}))
            self.instances[name] = made[0] if isinstance(made, tuple) else made

    async def step(self, turn: Turn) -> Step:
        """Answer the calls of a turn."""
        step = await super().step(turn)
        if step.done or turn.last:
            step.reward = (step.reward or 0.0) + await self._reward()
        return step

    async def cut_short(self) -> Step:
        """Ask for the rewards at the end."""
        return Step(reward=await self._reward())

    async def _reward(self) -> float:
        rewards = [await tool.calc_reward(self.instances[name]) for name, tool in self.objects.items()]
        return sum(number(reward) or 0.0 for reward in rewards)

    async def answer(self, call: ToolCall) -> Answered:
        """Execute a call; its reward is one of the turn. An error that a tool raises is told to the policy, as verl
        does."""
        if problem := self.box.problem(call):
            return Answered(f"Error: {problem}", False)
        with CaptureException() as captured:
            response, reward, metrics = await self.objects[call.name].execute(self.instances[call.name], call.arguments)
        if captured.cause is not None:
            return told(captured.cause, f"Error when executing tool: {captured.cause}")
        text = response if isinstance(response, str) else getattr(response, "text", None) or ""
        images = [{"type": "image", "image": image} for image in getattr(response, "image", None) or ()]
        content = [*images, {"type": "text", "text": text}] if images else text
        return Answered(content, True, number(reward), numbers(metrics))

    async def close(self) -> None:
        """Release the instances."""
        for name, instance in self.instances.items():
            await self.objects[name].release(instance)


def made(cls: type) -> Any:
    """Return a tool of a class: with the schema that it has itself, and without configuration."""
    return cls(**taken(cls, {"config": {}, "tool_schema": None}))


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
        if hasattr(self.inner, "finalize_interaction"):
            await called(self.inner.finalize_interaction, self.instance)
