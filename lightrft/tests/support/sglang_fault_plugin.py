"""A plugin under which SGLang fails in the middle of a response; ``FAULT`` is that of fault_plugin.

Of "raise" and "kill" the calls are passes of the model, and a rank is a scheduler's: of the first rank of an engine and
those after it. Of "die" they are calls of ``submit``. It leaves a file ``fault``.
``FAULT=scheduler`` kills the scheduler of rank 1 in the middle of the rollout after the 16th update, once, and leaves
the file that ``FAULT_MARK`` names.
"""
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

from lightrft.rollout.sglang import scheduler_patches
from lightrft.rollout.sglang.engine import SGLangEngine
from lightrft.tests.support.fault_plugin import due

UPDATES = 16
_IN_MODEL = os.environ.get("FAULT", "").startswith(("raise", "kill"))
_submit, _run_scheduler = SGLangEngine.submit, scheduler_patches.run_scheduler


def _strikes(folder: Path = Path()) -> str:
    if kind := due():
        (folder / "fault").touch()
    if kind in ("kill", "die"):
        os.kill(os.getpid(), signal.SIGKILL)
    return kind


def _harmed(engine: SGLangEngine, episodes: Any, *args: Any, **kwargs: Any) -> Any:
    if not _IN_MODEL:
        _strikes()
    return _submit(engine, episodes, *args, **kwargs)


def run_harmed(folder: Path, rank: int, shapes: Any, parent: int, last_words: Any, *args: Any) -> None:
    """A scheduler whose model fails."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    os.environ["RANK"] = str(rank + args[3])
    forward = ModelRunner.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        if _strikes(folder):
            raise RuntimeError("SGLang's model is broken")
        return forward(*args, **kwargs)

    ModelRunner.forward = failing
    _run_scheduler(shapes, parent, last_words, *args)


def _scheduler_killed(engine: SGLangEngine, episodes: Any, *args: Any, **kwargs: Any) -> Any:
    mark = Path(os.environ["FAULT_MARK"])
    if os.environ.get("RANK") == "1" and engine.weight_version == UPDATES and not mark.exists():
        mark.touch()
        threading.Timer(0.2, os.kill, (engine.native.processes[0].pid, signal.SIGKILL)).start()
    return _submit(engine, episodes, *args, **kwargs)


SGLangEngine.submit = _scheduler_killed if os.environ.get("FAULT") == "scheduler" else _harmed
if _IN_MODEL:
    scheduler_patches.run_scheduler = partial(run_harmed, Path.cwd(), int(os.environ.get("RANK", "0")))
