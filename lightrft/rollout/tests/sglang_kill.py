"""A plugin under which rank 1 loses its SGLang scheduler, killed in the middle of the rollout after the 20th update."""
import os
import signal
import threading
from pathlib import Path
from typing import Any

from lightrft.rollout.sglang.engine import SGLangEngine

UPDATES = 20
_generate = SGLangEngine.generate


def _harmed(engine: SGLangEngine, requests: Any, *args: Any) -> Any:
    if os.environ.get("RANK") == "1" and engine.weight_version == UPDATES and not MARK.exists():
        MARK.touch()
        threading.Timer(0.2, os.kill, (engine.native.processes[0].pid, signal.SIGKILL)).start()
    return _generate(engine, requests, *args)


MARK = Path(os.environ["MISCHIEF_MARK"])
SGLangEngine.generate = _harmed
