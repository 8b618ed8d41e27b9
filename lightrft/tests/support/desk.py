"""Environment of tests with two tools and a user; its schemas are made as it is imported, which takes transformers."""
from lightrft.environments.base import Step
from lightrft.environments.tools import ToolBox, ToolEnvironment


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def look(key: str) -> str:
    """Look something up.

    Args:
        key: Its name.
    """
    return f"page {key}"


class Desk(ToolEnvironment):
    """Tools that count how often they are run, and a user who asks once more behind a first text."""
    tools = ToolBox([add, look]).schemas

    def __init__(self):
        self.ran = 0
        super().__init__(ToolBox([add, look]))

    async def reset(self, prompt, seed):
        """Begin without a message."""

    async def answer(self, call):
        """Answer a call, and count it if it is run."""
        self.ran += not self.box.problem(call)
        return await super().answer(call)

    async def step(self, turn):
        """Answer calls; ask once."""
        before = self.ran
        step = Step("and?") if turn.number == 0 and not turn.calls and not turn.cut else await super().step(turn)
        step.metrics |= {"ran": self.ran - before, "room": turn.room}
        return step
