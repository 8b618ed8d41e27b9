"""Client of SGLang's ``Engine``, which runs in a separate thread.

The thread leaves the trainer's signals, children and environment alone.
"""
import asyncio
import multiprocessing
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import torch

from lightrft.rollout.weight_sync.sync import WeightManifest
from lightrft.rollout.sglang.launch import start_engine, isolated_environment
from lightrft.utils.errors import UserError
from lightrft.utils.watchdog import tick

T = TypeVar("T")
_POLL_S = 1.0  # between checks that the schedulers are alive
_REST_S = 60.0  # for the batches that are under way when the last answer has come
_NO_REASON = "it gave no reason (-9: killed, perhaps for lack of memory; see --engine_mem_util, --engine_kv_mib)"


class SGLangNative:
    """SGLang, whose scheduler processes are children of this one and are ended by this class.

    In the main thread SGLang would take over SIGTERM and end this process when one of its children fails. So it runs
    in another thread. A child that fails sends a SIGQUIT, which a handler here ignores; the failure is noticed where
    the child's answer is awaited. SGLang's own shutdown ends all children of the process and is not used.
    :meth:`shutdown` removes what SGLang leaves in this process, also after a start that failed.

    Raises:
        UserError: SGLang is missing, does not know an argument, or cannot run the model with them.
    """

    def __init__(self, arguments: dict[str, Any], weights: WeightManifest, device: torch.device) -> None:
        self.thread = ThreadPoolExecutor(1, "sglang", _block_signals)
        self.engine: Any = None
        self.cleanup, (self.last_words, scheduler_end) = ExitStack(), multiprocessing.Pipe(duplex=False)
        self._words, self._heard = "", 0.0  # when tokens came last
        self._on_quit = signal.signal(signal.SIGQUIT, lambda *_: None)
        before = set(multiprocessing.active_children())
        try:
            with isolated_environment(device, arguments.get("tp_size", 1)) as port, scheduler_end:
                self.engine = self.thread.submit(start_engine, arguments | {"nccl_port": port}, weights, scheduler_end,
                                                 self.cleanup).result()
        except UserError:
            raise
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise UserError(f"SGLang cannot run {arguments['model_path']}: {self._reported() or error}") from error
        finally:
            self.processes = list(set(multiprocessing.active_children()) - before)
            if self.engine is None:
                self.shutdown()

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager, which takes requests from coroutines for :meth:`run`."""
        return self.engine.tokenizer_manager

    @property
    def info(self) -> dict[str, Any]:
        """Properties that the first scheduler reported when it was ready."""
        return dict(self.engine._scheduler_init_result.scheduler_infos[0])

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine ``work()`` and return its result; SGLang's event loop here stands still between two calls.

        Raises:
            RuntimeError: a scheduler has ended.
        """
        return self.thread.submit(lambda: self.engine.loop.run_until_complete(self._watched(work()))).result()

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        while not task.done():
            if (newest := self.manager.last_receive_tstamp) != self._heard:  # tokens of responses that have not ended
                self._heard = newest
                tick()
            for process in self.processes:
                if not process.is_alive():
                    task.cancel()
                    raise RuntimeError(f"SGLang's scheduler (process {process.pid}) has ended with exit code "
                                       f"{process.exitcode}: {self._reported() or _NO_REASON}")
            await asyncio.wait([task], timeout=_POLL_S)
        return task.result()

    def come_to_rest(self) -> None:
        """Wait until the schedulers have nothing to do; this drops every cached prefix.

        An answer may come while the batch after it is under way. A scheduler that is told to release memory then ends.

        Raises:
            RuntimeError: they still work after a minute, or one has ended.
        """
        answer = self.run(lambda: self.manager.flush_cache(timeout_s=_REST_S))
        if not answer.success:
            raise RuntimeError(f"SGLang did not finish its work within {_REST_S:g} s: {answer.message}")

    def _reported(self) -> str:
        """Error that ended a scheduler, the first one where several failed; empty where one was killed."""
        if not self._words and self.last_words.poll():
            with suppress(EOFError):
                self._words = str(self.last_words.recv())
        return self._words

    def shutdown(self) -> None:
        """End the schedulers; their device memory is free afterwards."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.thread.submit(self.cleanup.close).result()
        self.thread.shutdown()
        self.last_words.close()
        signal.signal(signal.SIGQUIT, self._on_quit)


def _block_signals() -> None:
    """Block, for the children of this thread (the schedulers), the signals by which a launcher asks all processes of a
    rank to stop: the trainer ends them once it has saved."""
    resource_tracker.ensure_running()  # its start would unblock the signals again
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
