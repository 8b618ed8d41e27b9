"""The no-grad passes on finished samples, while the engine decodes the others (``--overlap_passes``)."""
import threading
from collections.abc import Sequence
from itertools import chain, repeat
from queue import SimpleQueue
from types import TracebackType

import torch
from torch import Tensor

from lightrft.rewards.caught import Caught
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.trainer.logprob_pass import Pass
from lightrft.trainer.replay_buffer import MicroBatchLimits, take
from lightrft.trainer.samples import pack_samples
from lightrft.types import Experience, Sample


class EarlyPasses:
    """A thread that runs ``passes`` on the samples it is given; to be entered around generation, once.

    Samples are packed in the order in which they are finished, which with the HF engine and vLLM hangs on requests and
    weights alone, so it makes no difference when a pass runs. Sharded forward passes are collectives: a round is one
    pass on every rank; a rank that has a pack waits for those that have none yet, and joins in with empty ones when its
    own are through. The collectives are those of this thread alone, for generating ranks have none in common.

    Args:
        n_per_prompt: samples of a group; with its number they tell samples apart.
    """

    def __init__(self, strategy: StrategyBase, passes: Sequence[Pass], limits: MicroBatchLimits,
                 n_per_prompt: int) -> None:
        self.strategy, self.passes, self.limits, self.n_per_prompt = strategy, passes, limits, n_per_prompt
        self.found: dict[int, Tensor] = {}  # by sample id: [fields, tokens]
        self._open: list[Sample] = []
        self._packs: SimpleQueue[list[Sample]] = SimpleQueue()  # the last one is empty
        self._caught = Caught()
        self._thread = threading.Thread(target=self._run, name="early passes", daemon=True)

    def __enter__(self) -> "EarlyPasses":
        self._stream = None
        if self.strategy.device.type == "cuda":  # beside the engine's kernels, and after the weights are there
            self._stream = torch.cuda.Stream(self.strategy.device)
            self._stream.wait_stream(torch.cuda.current_stream(self.strategy.device))
        self._thread.start()
        return self

    def add(self, samples: list[Sample]) -> None:
        """Take finished samples of this rank; raises what a pass has raised."""
        self._raise()
        for sample in samples:
            lens = [len(each.token_ids) for each in (*self._open, sample)]
            if not self.limits.fit(list(range(len(lens))), lens):
                self._send()
            self._open.append(sample)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        """Wait for the passes that are left, of all ranks; not after an error, for other ranks may never come."""
        if kind is None and self._open:
            self._send()
        self._packs.put([])
        if kind is None:
            self._thread.join()
            self._raise()

    def fill(self, exp: Experience) -> None:
        """Put what was found into the fields of ``exp``, samples of this rank."""
        names = [name for each in self.passes for name in each.fields]
        rows = [torch.zeros(len(names), 0), *(self.found[number] for number in exp.sample_ids.tolist())]
        vars(exp).update(zip(names, torch.cat(rows, 1)))

    def _send(self) -> None:
        self._packs.put(self._open)
        self._open = []

    def _raise(self) -> None:
        if self._caught.cause is not None:
            raise self._caught.cause

    def _run(self) -> None:
        with self._caught, torch.no_grad(), torch.cuda.stream(self._stream):  # errors belong to the main thread
            self._rounds()

    def _rounds(self) -> None:
        exp = None
        for pack in chain(iter(self._packs.get, []), repeat([])):
            if not self.strategy.any_rank(bool(pack)):
                return
            exp = pack_samples(pack, self.n_per_prompt) if pack else take(exp, [])  # every rank has a prompt
            found = torch.cat([each.forward(exp.to(self.strategy.device)) for each in self.passes]).float().cpu()
            if pack:
                self.found.update(zip(exp.sample_ids.tolist(), found.split(exp.seq_lens.tolist(), 1)))
