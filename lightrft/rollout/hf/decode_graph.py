"""CUDA graphs of the decode step: one launch instead of one per kernel.

For a small model, launching a decode step takes the host longer than the GPU needs to compute it. A graph replays the
kernels of a step on the same memory, so it is valid as long as a step has the same shapes and addresses. Shapes are
rounded up to a few, and what differs between steps of one shape is copied to where the graph reads it. A step may also
run in a larger shape, which has a graph already.
"""
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from operator import ge
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightrft.config.engines import HF_GRAPHS
from lightrft.rollout.hf.cache_plan import KVPlan
from lightrft.utils.errors import CaptureException
from lightrft.utils.logging import get_logger

EAGER = 1  # steps of one shape before it is captured: libraries load their kernels
_WIDTH = 64  # tokens by which short keys that a step reads grow
_SCORES = 8  # scores of a query with a key, for all heads, that take the time of a key and its value
_SPARE = 8  # a shape has room for more prompts and samples if that adds at most an eighth to its time


def padded_width(width: int, most: int) -> int:
    """Round tokens up to a multiple of 64 or of an eighth of the next power of two, to at most ``most``; masks hide
    the rest."""
    step = max(_WIDTH, (1 << (width - 1).bit_length()) // 8)
    return min(-(-width // step) * step, most)


def padded_rows(rows: int, most: int) -> int:
    """Round rows up to a power of two or three quarters of one, to at most ``most``."""
    above = 1 << (rows - 1).bit_length()
    return min(above - above // 4 if rows <= above - above // 4 else above, most)


class Shape(NamedTuple):
    """Sizes of a decode step: ``rows`` that read ``width`` tokens of responses, and ``prompts`` slots of ``longest``
    tokens, which ``samples`` rows each read at most."""
    rows: int
    prompts: int
    samples: int
    longest: int
    width: int

    @property
    def tokens(self) -> int:
        """Tokens of the cache that a step reads, and as many as take the time of its scores."""
        scores = self.rows * (self.width + self.longest) + self.prompts * self.samples * self.longest
        return self.rows * self.width + self.prompts * self.longest + scores // _SCORES

    def padded(self, plan: KVPlan) -> "Shape":
        """Round all sizes up, to at most those of the cache."""
        rows = padded_rows(self.rows, plan.slots)
        return Shape(rows, padded_rows(self.prompts, plan.prompts), padded_rows(self.samples, rows),
                     padded_width(self.longest, plan.prompt_len), padded_width(self.width, plan.length))

    def covers(self, other: "Shape") -> bool:
        """Return True if a step of the shape ``other`` can run in this one."""
        return all(map(ge, self, other))


class Shapes:
    """Shapes in which the steps of a generation run.

    A step runs in the smallest open shape that covers what it needs. What is padded costs the time to read it; once
    that adds up to a step, the needed shape is opened too: graphs are few in a short rollout, and fit well in a long
    one. The choice depends on the steps of this generation alone, not on the graphs that earlier ones have left, so a
    run that resumes computes the same numbers.

    Args:
        weights: tokens of the cache that take as many bytes as the weights, which every step reads.
        prompts: prompt slots.
    """

    def __init__(self, weights: int, prompts: int) -> None:
        self.weights, self.prompts = weights, prompts
        self.opened, self.padding = set[Shape](), Counter[Shape]()
        self.chosen: dict[Shape, Shape] = {}  # smallest open shape of each needed one

    def choose(self, needed: Shape) -> Shape:
        """Return the shape of a step that needs ``needed``."""
        shape = self.chosen.get(needed)
        if shape is None:
            larger = [shape for shape in self.opened if shape.covers(needed)]
            shape = self.chosen[needed] = min(larger, key=lambda x: (x.tokens, x)) if larger else self._open(needed)
        self.padding[needed] += shape.tokens - needed.tokens
        if self.padding[needed] > self.time(needed):
            self._open(needed)
        return shape

    def _open(self, needed: Shape) -> Shape:
        """Let steps that need ``needed``, or somewhat more, run in a shape of their own from now on."""
        self.opened.add(shape := self._roomy(needed))
        self.padding[needed], self.chosen = 0, {}
        return shape

    def time(self, shape: Shape) -> int:
        """Return the time of a step, as tokens of the cache that are read in it."""
        return self.weights + shape.tokens

    def _roomy(self, needed: Shape) -> Shape:
        """Let ``needed`` serve other steps as well, with more prompts and samples, where that costs little."""
        samples = max([needed.samples, *(min(shape.samples, needed.rows) for shape in self.opened)])
        prompts = max(needed.prompts, min(self.prompts, needed.rows))
        for roomy in (needed._replace(samples=samples, prompts=prompts), needed._replace(prompts=prompts)):
            if (roomy.tokens - needed.tokens) * _SPARE <= self.time(needed):
                return roomy
        return needed


class StepGraphs:
    """Runs steps: as they are, and on a GPU as graphs from the second step of a shape on.

    A step must read and write tensors that stay where they are until :meth:`free`. One that cannot be captured, because
    it waits for the device, turns graphs off, after one warning; one for which memory was lacking until :meth:`retry`.

    All graphs share one pool of memory: they run one after the other, and no result is read after the next step. So a
    capture takes no new memory where shapes are alike, and need not wait for the device and empty torch's cache, as
    ``torch.cuda.graph`` does.
    """

    def __init__(self, device: torch.device) -> None:
        self.enabled, self.device = device.type == "cuda", device
        self.lacked_memory, self.seen = False, Counter[Hashable]()
        self.stream: Any = torch.cuda.Stream(device) if self.enabled else None
        self.free()

    def free(self) -> None:
        """Drop all graphs and their memory: tensors that the steps use have moved.

        From then on shapes that have been seen are captured at once.
        """
        self.graphs = OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]]()  # with the result of each
        self.pool: Any = torch.cuda.graph_pool_handle() if self.enabled else None

    def retry(self) -> None:
        """Capture again if memory was lacking; call this when memory has changed hands."""
        self.enabled, self.lacked_memory = self.enabled or self.lacked_memory, False

    def run(self, key: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """Run ``step``, whose shapes and addresses depend on ``key`` alone; the result is valid until the next call."""
        if self.enabled and key not in self.graphs and self.seen[key] >= EAGER:
            self._capture(key, step)
        self.seen[key] += 1
        if key not in self.graphs:
            return step()
        self.graphs.move_to_end(key)
        graph, result = self.graphs[key]
        graph.replay()
        return result

    def _capture(self, key: Hashable, step: Callable[[], Tensor]) -> None:
        """Record the kernels of ``step``; nothing is computed. An error costs the graphs alone: a step that is wrong
        raises again where it runs as it is."""
        if not self.graphs:  # during a capture torch gives back none of the memory that an update has left cached
            torch.cuda.empty_cache()
        if len(self.graphs) >= HF_GRAPHS:
            self.graphs.popitem(last=False)
        with CaptureException() as captured:
            self.graphs[key] = self._record(step)
        if isinstance(captured.cause, Exception):
            self._give_up(captured.cause.__context__ or captured.cause)  # the end of a capture raises another one
            captured.cause = None  # its traceback has this frame, and a circle would keep the tensors of the step
        elif captured.cause is not None:
            raise captured.cause

    def _record(self, step: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        """Capture ``step`` on a stream of its own; return its graph and where that writes the result."""
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            graph.capture_begin(self.pool, "thread_local")  # other threads may allocate meanwhile
            try:
                result = step()
            finally:
                graph.capture_end()
        return graph, result

    def _give_up(self, cause: BaseException) -> None:
        """Run the steps that follow as they are. ``cause``: the error that ended the capture."""
        self.enabled, self.lacked_memory = False, isinstance(cause, torch.OutOfMemoryError)
        self._end_allocation()
        self._end_capture_mode()
        self.free()
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
