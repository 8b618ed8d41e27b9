"""Worker process of environments: many sessions in one event loop, each call with its own time limit.

In, pickled: ``("load", spec, limit_s)``, then ``("reset", call, session, task, seed)``, ``("step", call, session,
turn)``, ``("cut_short", call, session)`` and ``("close", call, session)``. Out, as JSON, so that a tool cannot send an
object: ``{"loaded": info}`` or ``{"failed": text}``, then ``{"call": number, ...}`` with an answer or a failure.
"""
import asyncio
import concurrent.futures
import inspect
import json
import math
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from lightrft.environments import interop
from lightrft.environments.base import Step, Task, Turn, UnreadMedia
from lightrft.environments.loading import load
from lightrft.environments.observations import check_size, encoded, has_pictures, plain_history, plain_messages
from lightrft.rewards.workers.event_loop import LOOP_FILES
from lightrft.rewards.workers.lifetime import die_with, end_group
from lightrft.rewards.workers.prints import label_prints
from lightrft.utils.errors import CaptureException

MAX_BYTES = 1 << 20  # of one answer without its pictures: the context of a model is smaller
_THREADS = 256  # of tools that are not async
_ENDS_S = 1.0  # that a coroutine may take to end when it is cancelled
_THREAD_FILES = (os.path.dirname(concurrent.futures.__file__), interop.__file__)


class Lane:
    """A task that makes the calls of a session, one after another: what a method opens, such as the connection to a
    server of tools (MCP), another one can close in the same task alone, and context variables last."""

    def __init__(self) -> None:
        self._calls = asyncio.Queue[tuple[Coroutine[Any, Any, dict[str, Any]], asyncio.Future[dict[str, Any]]] | None]()
        self._idle, self._task = asyncio.Event(), asyncio.create_task(self._run())

    async def within(self, limit_s: float, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
        """Return what ``work``, which raises nothing, returns; None: it takes too long, and is cancelled."""
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls.put_nowait((work, answer))
        if not (await asyncio.wait({answer}, timeout=limit_s))[0]:
            self._task.cancel()
            return None
        return answer.result()

    async def idle(self, limit_s: float) -> bool:
        """Wait until no call is under way; False: one is still."""
        return bool((await asyncio.wait({asyncio.ensure_future(self._idle.wait())}, timeout=limit_s))[0])

    def end(self) -> None:
        """End the task once it is idle."""
        self._calls.put_nowait(None)

    async def _run(self) -> None:
        while True:
            try:
                call = await self._calls.get()
            except asyncio.CancelledError:  # by what a method has left open, such as a connection that is lost
                continue
            if call is None:
                return
            self._idle.clear()
            work, answer = call
            answer.set_result(await work)
            self._idle.set()


class Session:
    """Environment of one response; methods that are not ``async`` run in a thread of its own."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self.factory, self.inner, self._thread = factory, None, _thread()
        self.lane = Lane()
        self.late = False  # a call took too long; its thread may hang

    async def reset(self, task: Task, seed: int) -> dict[str, Any]:
        """Make the environment and begin."""
        self.inner = await self._in_thread(self.factory)
        answer = await self._call("reset", task, seed)
        if isinstance(answer, Step):
            return await self._plain(plain, only_messages(answer))
        return {"messages": await self._plain(plain_messages, answer)}

    async def step(self, turn: Turn) -> dict[str, Any]:
        """Answer a turn."""
        return await self._step("step", turn)

    async def cut_short(self) -> dict[str, Any]:
        """End a response without its last answer; an environment without such a method has nothing to say."""
        return await self._step("cut_short") if hasattr(self.inner, "cut_short") else plain(Step())

    async def close(self, patience_s: float = 0.0) -> dict[str, Any]:
        """Close the environment, if it has such a method. A call that took too long may end first, within
        ``patience_s``; if it hangs, this is what may end it, so it is closed beside it, in another thread."""
        if hasattr(self.inner, "close"):
            if self.late and not (await asyncio.wait({asyncio.ensure_future(self._in_thread(int))},
                                                     timeout=patience_s))[0]:
                self._leave_thread()
                self._thread = _thread()
            await self._call("close")
        return plain(Step())

    async def renew(self) -> None:
        """Let the next call run beside one that took too long, and that does not end as it is cancelled."""
        if self.late and not await self.lane.idle(_ENDS_S):
            self.lane.end()
            self.lane = Lane()

    def forget(self) -> None:
        """Let the thread and the task end as soon as they are idle."""
        self._leave_thread()
        self.lane.end()

    def _leave_thread(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _step(self, method: str, *arguments: Any) -> dict[str, Any]:
        answer = await self._call(method, *arguments)
        if not isinstance(answer, Step):
            raise TypeError(f"{method}() returned {answer!r}, and must return a Step(messages, reward, done, metrics)")
        return await self._plain(plain, answer)

    async def _plain(self, convert: Callable[[Any], Any], answer: Any) -> Any:
        """Convert an answer; in the session's thread if that takes long."""
        return await self._in_thread(convert, answer) if has_pictures(answer) else convert(answer)

    async def _call(self, method: str, *arguments: Any) -> Any:
        function = getattr(self.inner, method)
        interop.OWN_THREAD.set(self._thread)
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        result = await self._in_thread(function, *arguments)
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, interop.without_stop, function,
                                                                *arguments)


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "environment")


def only_messages(step: Step) -> Step:
    """Return what an environment says at its start, before any turn has earned something.

    Raises:
        TypeError: it has a reward, a metric, a picture of a text, or an end.
    """
    if step.reward is not None or step.done or step.metrics or step.images:
        raise TypeError(f"reset() returned {step!r}; before the first turn a Step has messages or a text alone")
    return step


def plain(step: Step) -> dict[str, Any]:
    """Return an answer as plain values.

    Raises:
        TypeError, ValueError: a field has another type, a number is not finite, a picture cannot be read, or there is
            a history beside messages.
    """
    reward = interop.number(step.reward)
    metrics = {str(name): interop.scalar(value) for name, value in (step.metrics or {}).items()}
    for name, value in [("the reward", reward), *metrics.items()]:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name} is {value}, and must be a finite number")
    if step.text is not None and not isinstance(step.text, str):
        raise TypeError(f"the text of a step is {step.text!r}")
    if step.text is not None and step.messages:
        raise ValueError(f"a step has a text and messages: {step.text!r} and {step.messages!r}. Give one of them")
    if step.images and step.text is None and not step.done:
        raise ValueError(f"a step has {len(step.images)} images and no text, whose placeholders they fill. Give it a "
                         "text, or write them as parts of its messages")
    if step.history is not None and (step.messages or step.text is not None or step.images):
        raise ValueError("a step has a history and messages beside it. The history is the whole conversation from now "
                         "on: write the messages at its end")
    return {"messages": plain_messages(step.messages), "reward": reward, "done": bool(step.done), "metrics": metrics,
            "text": step.text, "images": [*map(encoded, step.images)],
            "history": plain_history(step.history)}  # yapf: disable


class Server:
    """Answers the calls of the trainer until it closes the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.sessions = pipe, dict[int, Session]()
        self.factory: Callable[[], Any] | None = None
        self.limit_s, self.tasks = 0.0, set[asyncio.Task[None]]()

    async def run(self) -> None:
        """Serve a loaded environment."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS, "tool"))
        threading.Thread(target=self._read, args=(loop, ended), daemon=True).start()
        await ended.wait()
        end_group()  # the loop would wait for threads that hang

    def load(self) -> None:
        """Load the environment before the loop runs, since its file may run a loop of its own. Without one this process
        ends."""
        _, spec, self.limit_s = self.pipe.recv()
        with CaptureException() as captured:
            self.factory, info = load(spec)
        if captured.cause is None:
            self._send({"loaded": asdict(info)})
            return
        known = isinstance(captured.cause, ValueError)
        self._send({"failed": str(captured.cause) if known else captured.text})
        end_group()

    def _read(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        with suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(self._start, self.pipe.recv())
        loop.call_soon_threadsafe(ended.set)

    def _start(self, message: tuple[Any, ...]) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(*message))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _serve(self, kind: str, *arguments: Any) -> None:
        call, number, *rest = arguments
        assert self.factory is not None, "it is loaded"
        if kind == "reset":
            self.sessions[number] = Session(self.factory)
        session = self.sessions[number]
        if kind == "close":
            rest = [self.limit_s / 2]
            await session.renew()
        answer = await session.lane.within(self.limit_s, answered(getattr(session, kind), rest))
        session.late = answer is None
        late = {"failure": "timeout", "detail": f"no answer within {self.limit_s:g} s (--env_timeout_s)"}
        if kind == "close":
            self.sessions.pop(number).forget()
        self._send({"call": call} | (late if answer is None else answer))

    def _send(self, message: dict[str, Any]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send_bytes(_encoded(message))


async def answered(method: Callable[..., Awaitable[dict[str, Any]]], arguments: Sequence[Any]) -> dict[str, Any]:
    """Return the answer of a session, or why there is none."""
    with CaptureException() as captured:
        answer = await method(*arguments)
        shown = check_size([*answer["messages"], *(answer.get("history") or ())], answer.get("images", ()))
        if (size := len(json.dumps(answer)) - shown) > MAX_BYTES:
            raise ValueError(f"the answer has {size} bytes, and at most {MAX_BYTES} are taken")
        return answer
    if isinstance(captured.cause, UnreadMedia):
        return {"failure": "refused", "detail": str(captured.cause)}
    return {"failure": "exception", "detail": captured.text_below(__file__, *LOOP_FILES, *_THREAD_FILES)[-8000:]}


def _encoded(message: dict[str, Any]) -> bytes:
    """Return JSON in UTF-8. Half a character (a lone surrogate), which no tokenizer takes, is a replacement character.
    """
    text = json.dumps(message, ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def main(fd: int, parent: int) -> None:
    """Entry point of the process: ``fd`` is its end of the pipe."""
    die_with(parent, fd)
    label_prints("env worker")
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    server = Server(Connection(fd))
    with suppress(EOFError, ConnectionResetError):
        server.load()
    asyncio.set_event_loop(loop)  # asyncio.run() in the file leaves none
    served = loop.create_task(server.run())
    while not served.done():
        with suppress(SystemExit, KeyboardInterrupt):  # of a task, such as one call of several, which keeps it too
            loop.run_until_complete(served)
    served.result()
