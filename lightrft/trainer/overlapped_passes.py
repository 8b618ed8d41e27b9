"""Runs the no-grad passes on finished responses while the engine decodes the others (``--overlap_passes``)."""
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lightrft.strategy.base import StrategyBase
from lightrft.trainer.logprob_pass import LogprobPass, Pass
from lightrft.trainer.batch_plan import MicroBatchLimits, select_micro_batch
from lightrft.types import Batch, Episode, Prompt
from lightrft.utils.errors import CaptureException
from lightrft.utils.timer import Timer


class PassThread:
    """Runs ``passes`` on finished samples in a thread. Enter it once, around generation.

    Samples are packed in the order in which they are added. Sharded forward passes are collectives: a round is one
    pass on every rank. A rank that has a pack waits for those that have none yet, and joins with empty packs once its
    own are done. Only this thread runs collectives, because generating ranks share none.

    Args:
        stream: CUDA stream of the passes; None on CPUs.
    """

    def __init__(self, strategy: StrategyBase, passes: Sequence[Pass], limits: MicroBatchLimits,
                 stream: Any = None) -> None:
        self.strategy, self.passes, self.limits, self._stream = strategy, passes, limits, stream
        self.results: dict[tuple[int, int], Tensor] = {}  # by group and index of the sample: [fields, tokens]
        self._open: list[Episode] = []
        self._packs: SimpleQueue[list[Episode]] = SimpleQueue()  # the last one is empty
        self._caught = CaptureException()
        self._thread = threading.Thread(target=self._run, name="overlapped passes", daemon=True)

    def __enter__(self) -> "PassThread":
        if self._stream is not None:  # runs alongside the engine's kernels, once the weights are loaded
            self._stream.wait_stream(torch.cuda.current_stream(self.strategy.device))
        self._thread.start()
        return self

    def add(self, samples: list[Episode]) -> None:
        """Add finished samples of this rank; raise the error of a failed pass."""
        self._raise()
        for sample in samples:
            lens = [each.joined.num_tokens for each in (*self._open, sample)]
            if not self.limits.fit([[i] for i in range(len(lens))], lens):
                self.flush()
            self._open.append(sample)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Wait for the remaining passes of all ranks; not after an error, as other ranks may never join."""
        if kind is None:
            self.flush()
        self._packs.put([])
        if kind is None:
            self._thread.join()
            self._raise()

    def fill(self, exp: Batch) -> None:
        """Write the results into the fields of ``exp``, which holds samples of this rank."""
        names = [name for each in self.passes for name in each.fields]
        rows = [torch.zeros(len(names), 0), *(self.results[key] for key in exp.keys)]
        vars(exp).update(zip(names, torch.cat(rows, 1)))

    def flush(self) -> None:
        """Send the samples that are not yet in a pack as one."""
        if self._open:
            self._packs.put(self._open)
            self._open = []

    def _raise(self) -> None:
        if self._caught.cause is not None:
            raise self._caught.cause

    def _run(self) -> None:
        if self._stream is not None:  # a new thread is on GPU 0, where every rank would open a context
            torch.cuda.set_device(self.strategy.device)
        with self._caught, torch.no_grad(), torch.cuda.stream(self._stream):  # errors belong to the main thread
            self._rounds()

    def _rounds(self) -> None:
        exp: Any = None  # the batch of the newest pack
        for pack in chain(iter(self._packs.get, []), repeat([])):
            if not self.strategy.any_rank(bool(pack)):
                return
            exp = Batch.of(pack) if pack else select_micro_batch(exp, [])  # every rank has a prompt
            values = torch.cat([each.forward(exp.to(self.strategy.device)) for each in self.passes]).float().cpu()
            if pack:
                self.results.update(zip(exp.keys, values.split(exp.seq_lens.tolist(), 1)))


class OverlappedPasses:
    """Listener that computes the fields of ``logprobs`` for the samples of this rank before they move.

    Packs are the same in every run. With the HF engine and vLLM responses finish in an order that depends only on
    requests and weights; with an environment it depends on the time of its answers, so packs hold whole groups then.

    Args:
        num_samples: samples of the rollout batch, over all ranks.
        whole_groups: a pack holds samples of one group, by their index.
    """

    def __init__(self, strategy: StrategyBase, logprobs: LogprobPass, num_samples: int, timer: Timer,
                 whole_groups: bool = False) -> None:
        self.strategy, self.logprobs, self.num_samples, self.timer = strategy, logprobs, num_samples, timer
        self.whole_groups, self.waiting = whole_groups, defaultdict[int, list[Episode]](list)
        # One for the whole run: torch deals out 32 in turn, and a new one per rollout would come to the stream on which
        # the hf engine captures its graphs.
        self.stream = torch.cuda.Stream(strategy.device) if strategy.device.type == "cuda" else None

    @contextmanager
    def during(self, groups: Sequence[int]) -> Iterator[None]:
        """Run the passes of one generation; it ends when those of all ranks are done."""
        self.thread = PassThread(self.strategy, self.logprobs.wanted(self.num_samples), self.logprobs.limits,
                                 self.stream)
        with self.timer("overlapped_passes"), self.thread:
            yield

    def wants_each(self, prompts: Sequence[Prompt]) -> bool:
        """Return True: every response that is finished may start a pass."""
        return True

    def arrived(self, samples: list[Episode]) -> None:
        """Add finished samples to the next pass, or keep them until their group is finished."""
        for sample in samples if self.whole_groups else ():
            self.waiting[sample.group_id].append(sample)
        if not self.whole_groups:
            self.thread.add(samples)

    def finished(self, group: int) -> None:
        """Send a group that was kept."""
        if group in self.waiting:
            self.thread.add(sorted(self.waiting.pop(group), key=lambda sample: sample.index))
            self.thread.flush()

    def fill(self, exp: Batch) -> None:
        """Write the results into the fields of ``exp``, the packed samples of this rank."""
        self.thread.fill(exp)
