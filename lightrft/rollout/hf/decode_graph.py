"""CUDA graphs of the decode step: one launch in place of one per kernel.

A decode step of a small model takes the host longer than the GPU. A graph replays the kernels of a step on the same
memory, so it is valid as long as a step has the same shapes and addresses.
"""
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from lightrft.utils.logging import get_logger

_EAGER = 2  # steps of one shape before it is captured: libraries allocate their workspaces, and many shapes end
_WIDTH = 64  # tokens by which the keys that a step reads grow


def padded_width(width: int, most: int) -> int:
    """Round ``width`` up, to at most ``most``, so that many steps have the same shape; masks hide the rest."""
    return min(-(-width // _WIDTH) * _WIDTH, most)


class StepGraph:
    """Runs a step again and again: as it is, and on a GPU as a graph once its ``key`` has stayed the same for a while.

    A step must read and write tensors that stay where they are. One that cannot be captured, because it waits for the
    device, runs as it is from then on, after one warning.
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled = device.type == "cuda"
        self.forget()

    def forget(self) -> None:
        """Drop the graph: tensors that a step uses have moved."""
        self.key: Hashable = None
        self.seen = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None

    def run(self, key: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """Run ``step``, whose shapes depend on ``key`` alone; the result is valid until the next call."""
        if key != self.key:
            self.forget()
            self.key = key
        self.seen += 1
        if self.enabled and self.graph is None and self.seen > _EAGER:
            self._capture(step)
        if self.graph is None or self.result is None:
            return step()
        self.graph.replay()
        return self.result

    def _capture(self, step: Callable[[], Tensor]) -> None:
        """Record the kernels of ``step``; nothing is computed."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.stream(torch.cuda.current_stream())
        try:
            # torch's context does not leave its own stream after an error; other threads may allocate meanwhile
            with stream, torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.result = step()
            self.graph = graph
        except RuntimeError as error:
            self.enabled, reason = False, str(error.__context__ or error).splitlines()[0]
            get_logger().warning(f"the hf engine decodes without CUDA graphs: a step cannot be captured ({reason})")
