"""The environment that an option names: by the name under which a program has registered it, and its end."""
import pytest

from lightrft.config.engines import EngineConfig
from lightrft.environments.base import ENVIRONMENTS, Step, Task, Turn
from lightrft.environments.opening import open_pool
from lightrft.tests.support.processes import wait_until
from lightrft.utils.errors import UserError


@pytest.fixture(name="registered")
def fixture_registered(tmp_path):
    """An environment that leaves a file when it is closed, under a name."""
    closed = tmp_path / "closed"

    class Bell:
        """Rings once."""

        def reset(self, prompt, seed):
            self.seed = seed

        async def step(self, turn):
            return Step(f"ding {self.seed}", done=turn.number == 1)

        def close(self):
            with open(closed, "w", encoding="utf-8") as file:
                file.write(str(self.seed))

    ENVIRONMENTS.register("bell")(Bell)
    yield closed
    ENVIRONMENTS._entries.pop("bell")


def test_a_registered_name_is_an_environment_which_is_closed(registered):
    pool = open_pool(EngineConfig(environment="bell"))
    session, opened = pool.reset(Task("u", "text"), 7)
    assert opened.result(20).messages == []
    assert pool.step(session, Turn("a")).result(20).messages == [{"role": "user", "content": "ding 7"}]
    assert not registered.exists()
    pool.close(session)
    assert wait_until(registered.exists) and wait_until(lambda: registered.read_text() == "7")
    pool.shutdown()


def test_an_unknown_name_is_told():
    with pytest.raises(UserError, match="no_such_bell"):
        open_pool(EngineConfig(environment="no_such_bell"))
