"""Worker process that scores: killable at any moment, ends with its parent, imports neither torch nor the script.

Protocol over one pipe. In: ``(spec, batch)``. Out: ``("loading", None)`` before a reward is imported; ``("loaded",
info)`` or ``("failed", text)``; then the outcomes in lists, each of which restarts the parent's deadline.
"""
import atexit
import pickle
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from lightrft.rewards.base import Outcome, RewardInput
from lightrft.utils.errors import CaptureException
from lightrft.rewards.workers.event_loop import close_event_loop, event_loop
from lightrft.rewards.workers.lifetime import die_with, end_group
from lightrft.rewards.workers.prints import label_prints
from lightrft.rewards.workers.user_file import awaited, load, Scorer, scorer_of, scorer_of_batches

_TOGETHER_S = 1e-3  # faster outcomes share a message: a message costs both sides more than they do
_MATH_BYTES = 2 << 30  # limit of one algebra call: 9**9**9 must not take the machine's memory


@dataclass(frozen=True)
class Spec:
    """Specification of a worker's reward: ``math``, a user's ``file`` (path, function), a pickled ``function`` of a
    known signature, or a pickled ``callable`` that takes reward inputs."""
    kind: str
    path: str = ""
    function: str = ""
    pickled: bytes = b""


@dataclass(frozen=True)
class Info:
    """Description of a loaded reward: the name of the function, and the facts of
    :class:`~lightrft.rewards.workers.user_file.Loaded`."""
    name: str
    batched: bool
    columns: tuple[str, ...] = ()
    reads_models: bool = False


def resolve(spec: Spec) -> tuple[Scorer, Info]:
    """Import the reward that ``spec`` names."""
    if spec.kind in ("file", "function"):
        loaded = load(spec.path, spec.function) if spec.kind == "file" else scorer_of(
            pickle.loads(spec.pickled), f"reward {spec.function}", spec.function)
        return loaded.scorer, Info(loaded.name, loaded.batched, loaded.columns, loaded.reads_models)
    if spec.kind == "callable":
        reward = pickle.loads(spec.pickled)
        return scorer_of_batches(lambda batch: awaited(reward(batch))), Info(spec.function, True)
    next(_math([RewardInput("", r"\boxed{\frac{1}{2}}",
                            reference=r"\sqrt{4}")]))  # imports and caches, before any deadline
    return _math, Info("math", False)


def _math(batch: list[RewardInput]) -> Iterator[Outcome]:
    from lightrft.rewards.rules import verify_math
    for item in batch:
        with CaptureException() as captured, _memory_cap(_MATH_BYTES):
            outcome = verify_math(item)
        yield Outcome(None, "exception", captured.text) if captured.cause is not None else outcome


@contextmanager
def _memory_cap(more: int) -> Iterator[None]:
    """Make allocations of more than ``more`` bytes beyond the current size raise ``MemoryError`` (Linux)."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = int(statm.read_text().split()[0]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (wanted if soft < 0 else min(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def serve(pipe: Connection) -> None:
    """Answer requests until the parent closes the pipe."""
    loaded: dict[Spec, tuple[Scorer, Info]] = {}
    while True:
        spec, batch = pipe.recv()
        if spec not in loaded:
            pipe.send(("loading", None))
            with CaptureException() as captured:
                loaded[spec] = resolve(spec)
            if captured.cause is not None:
                pipe.send(("failed", str(captured.cause) if isinstance(captured.cause, ValueError) else captured.text))
                continue
        scorer, info = loaded[spec]
        pipe.send(("loaded", info))
        for outcomes in _bundles(scorer(batch) if batch else ()):
            pipe.send(outcomes)


def _bundles(outcomes: Iterable[Outcome | None]) -> Iterator[list[Outcome]]:
    """Group outcomes into lists; a None (before a step that may take long) or a slow outcome ends a list."""
    ready, sent = list[Outcome](), time.monotonic()
    for outcome in outcomes:
        ready += [] if outcome is None else [outcome]
        if outcome is None or time.monotonic() - sent > _TOGETHER_S:
            yield ready
            ready, sent = [], time.monotonic()
    if ready:
        yield ready


def main(fd: int, parent: int) -> None:
    """Entry point of the process: ``fd`` is its end of the pipe."""
    die_with(parent, fd)
    label_prints("reward worker")
    atexit.register(end_group)  # the first one runs last
    event_loop()
    try:
        serve(Connection(fd))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        close_event_loop()  # the parent is gone or has closed the pipe
