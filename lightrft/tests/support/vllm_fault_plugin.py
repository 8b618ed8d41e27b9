"""A plugin under which vLLM fails in the middle of a response; ``FAULT`` is that of fault_plugin.

The calls are the passes of its model or, for "long", what it submits before ranks share it. It leaves a file ``fault``.
"""
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from lightrft.rollout import scheduler
from lightrft.tests.support.fault_plugin import due

_LONG = os.environ.get("FAULT", "").startswith("long")
_execute, _share = GPUModelRunner.execute_model, scheduler.share_episodes


def _strikes() -> str:
    if kind := due():
        Path("fault").touch()
    return kind


def _harmed(runner: Any, *args: Any, **kwargs: Any) -> Any:
    kind = "" if _LONG else _strikes()
    if kind == "raise":
        raise RuntimeError("vLLM's model is broken")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return _execute(runner, *args, **kwargs)


def _lengthened(episodes: Any, group: Any) -> Any:
    if _LONG and _strikes():
        last = episodes[-1]
        prompt = replace(last.prompt, token_ids=last.prompt.token_ids * 99)
        episodes = [replace(each, prompt=prompt) if each.group_id == last.group_id else each for each in episodes]
    return _share(episodes, group)


GPUModelRunner.execute_model, scheduler.share_episodes = _harmed, _lengthened
