"""The event loop of a worker process: one for its whole life, so that the clients and locks of a reward stay usable."""
import asyncio
import os
from collections.abc import Awaitable, Iterable
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

LOOP_FILES = (__file__, os.path.dirname(asyncio.__file__))  # whose frames precede those of a function in a traceback


@lru_cache(maxsize=None)
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process; it is the current one while a reward is imported."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """Return the result of ``awaitable``. If it raises, the tasks that it has begun are cancelled; others go on with
    the next call."""
    loop = event_loop()
    others = asyncio.all_tasks(loop)
    with ExitStack() as on_error:
        on_error.callback(lambda: _cancel(asyncio.all_tasks(loop) - others))
        result = loop.run_until_complete(_result(awaitable))
        on_error.pop_all()
    return result


async def _result(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _cancel(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel ``tasks`` and wait until they have cleaned up."""
    for task in (tasks := list(tasks)):
        task.cancel()
    event_loop().run_until_complete(_ended(tasks))


async def _ended(tasks: list["asyncio.Task[Any]"]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


def close_event_loop() -> None:
    """End the tasks, generators and threads of the loop, and close it."""
    loop = event_loop()
    _cancel(asyncio.all_tasks(loop))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
