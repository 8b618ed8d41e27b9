"""Asynchronous scheduling of vLLM, which CUDA takes by default, on a CPU."""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def scheduled_ahead() -> Iterator[None]:
    """Let engines that start in this context schedule a step before the last one has ended.

    vLLM decides on it as on CUDA, and then turns it off on a CPU.
    """
    from vllm.platforms.cpu import CpuPlatform
    checked = CpuPlatform.check_and_update_config.__func__

    def update(cls: type, config: Any) -> None:
        assert config.scheduler_config.async_scheduling, "on CUDA it would not either"
        checked(cls, config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(update))
        yield
