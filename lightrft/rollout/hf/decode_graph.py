"""CUDA graphs of the decode step: one launch instead of one per kernel.

For a small model, launching a decode step takes the host longer than the GPU needs to compute it. A graph replays the
kernels of a step on the same memory, so it is valid as long as a step has the same shapes and addresses.
"""
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightrft.utils.errors import CaptureException
from lightrft.utils.logging import get_logger

_EAGER = 2  # steps of one shape before it is captured: libraries allocate their workspaces, and many shapes end
_WIDTH = 64  # tokens by which the keys that a step reads grow


def padded_width(width: int, most: int) -> int:
    """Round ``width`` up, to at most ``most``, so that many steps have the same shape; masks hide the rest."""
    return min(-(-width // _WIDTH) * _WIDTH, most)


class StepGraph:
    """Runs a step again and again: as it is, and on a GPU as a graph once its ``key`` has stayed the same for a while.

    A step must read and write tensors that stay where they are. One that cannot be captured, because it waits for the
    device, runs as it is from then on, after one warning; one for which memory was lacking until :meth:`retry`.

    The graphs of one generation follow each other in one pool of memory. So a capture takes no new memory where shapes
    are alike, and need not wait for the device and empty torch's cache, as ``torch.cuda.graph`` does.
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled, self.device = device.type == "cuda", device
        self.lacked_memory = False
        self.stream: Any = torch.cuda.Stream(device) if self.enabled else None
        self.free()

    def free(self) -> None:
        """Drop the graph and its memory."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.pool: Any = torch.cuda.graph_pool_handle() if self.enabled else None
        self.forget()

    def forget(self) -> None:
        """Stop using the graph: tensors that a step uses have moved. Its memory waits for the next one."""
        self.key: Hashable = None
        self.seen = 0
        self.result: Tensor | None = None

    def retry(self) -> None:
        """Capture again if memory was lacking; call this when memory has changed hands."""
        self.enabled, self.lacked_memory = self.enabled or self.lacked_memory, False

    def run(self, key: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """Run ``step``, whose shapes depend on ``key`` alone; the result is valid until the next call."""
        if key != self.key:
            self.forget()
            self.key = key
        self.seen += 1
        if self.enabled and self.result is None and self.seen > _EAGER:
            self._capture(step)
        if self.graph is None or self.result is None:
            return step()
        self.graph.replay()
        return self.result

    def _capture(self, step: Callable[[], Tensor]) -> None:
        """Record the kernels of ``step``; nothing is computed. An error costs the graphs alone: a step that is wrong
        raises again where it runs as it is."""
        graph = torch.cuda.CUDAGraph()
        if self.graph is None:  # during a capture torch gives back none of the memory that an update has left cached
            torch.cuda.empty_cache()
        self.stream.wait_stream(torch.cuda.current_stream())
        with CaptureException() as captured, torch.cuda.stream(self.stream):
            graph.capture_begin(self.pool, "thread_local")  # other threads may allocate meanwhile
            try:
                self.result = step()
            finally:
                graph.capture_end()
        if captured.cause is None:
            self.graph = graph  # the former one held the pool until now
        elif isinstance(captured.cause, Exception):
            self._give_up(captured.cause.__context__ or captured.cause)  # the end of a capture raises another one
            captured.cause = None  # its traceback has this frame, and a circle would keep the tensors of the step
        else:
            raise captured.cause

    def _give_up(self, cause: BaseException) -> None:
        """Run the steps that follow as they are. ``cause``: the error that ended the capture."""
        self.result, self.enabled, self.lacked_memory = None, False, isinstance(cause, torch.OutOfMemoryError)
        self._end_allocation()
        self._end_capture_mode()
        self.graph = None
        until = " until the engine next wakes" if self.lacked_memory else ""
        reason = next(iter(str(cause).splitlines()), type(cause).__name__)
        get_logger().warning(f"the hf engine decodes without CUDA graphs{until}: a step cannot be captured ({reason})")

    def _index(self) -> int:
        return torch.cuda.current_device() if self.device.index is None else self.device.index

    def _end_capture_mode(self) -> None:
        """Let the generator of the GPU draw as before a capture that failed. In torch 2.11 its state stays in the mode
        of captures until one ends well, and dropout would raise. A copy has seed and offset, but not the mode."""
        with suppress(RuntimeError, AttributeError):  # a GPU in error, or another torch: decoding must go on
            generator = torch.cuda.default_generators[self._index()]
            generator.graphsafe_set_state(generator.clone_state())

    def _end_allocation(self) -> None:
        """Let torch allocate as before a capture that failed. ``capture_end`` then raises before it does so, and torch
        would keep memory that another stream has used for ever."""
        index = self._index()
        # RuntimeError: the capture itself had ended, and the graph has given the pool back. The others: torch's private
        # functions have changed, and decoding without graphs must go on.
        with suppress(RuntimeError, AttributeError, TypeError):
            torch._C._cuda_endAllocateToPool(index, self.pool)
            torch._C._cuda_releasePool(index, self.pool)
