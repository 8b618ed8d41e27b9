"""SGLang's ``Engine`` in a thread of its own, which leaves the trainer's signals, children and environment alone."""
import asyncio
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lightrft.config.engine_rules import INSTALL
from lightrft.config.options import did_you_mean
from lightrft.rollout import sglang_child
from lightrft.rollout.vllm_start import process_state_kept
from lightrft.rollout.named_weights import Shapes
from lightrft.utils.errors import UserError

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

T = TypeVar("T")
_LOOK_S = 1.0  # between looks whether the schedulers are alive
_LAUNCHER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
             "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_")  # yapf: disable


class SGLangNative:
    """SGLang, whose scheduler processes are children of this one, and ours to end.

    SGLang would take over SIGTERM and end this process when a child of its fails, but only in the main thread. So it
    lives in another; a child that fails sends a SIGQUIT, for which there is a handler here that does nothing, and is
    noticed where its answer is awaited. SGLang's own shutdown ends all children of the process and is not used.

    Raises:
        UserError: SGLang is missing, does not know an argument, or cannot run the model with them.
    """

    def __init__(self, arguments: dict[str, Any], shapes: Shapes, device: torch.device) -> None:
        self.thread, self.engine = ThreadPoolExecutor(1, "sglang"), None
        self._on_quit = signal.signal(signal.SIGQUIT, lambda *_: None)
        before = set(multiprocessing.active_children())
        try:
            with _surroundings(device, arguments.get("tp_size", 1)), _port() as port:
                self.engine = self.thread.submit(_start, arguments | {"nccl_port": port}, shapes).result()
        except UserError:
            raise
        except (ValueError, NotImplementedError, RuntimeError) as error:
            raise UserError(f"SGLang cannot run {arguments['model_path']}: {error}") from error
        finally:
            self.processes = list(set(multiprocessing.active_children()) - before)
            if self.engine is None:
                self.shutdown()

    @property
    def manager(self) -> Any:
        """What the requests go to, from coroutines for :meth:`run`."""
        return self.engine.tokenizer_manager

    @property
    def room(self) -> int:
        """Tokens that the key-value cache holds."""
        return int(self.engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"])

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine ``work()`` returns; nothing of SGLang in this process goes on between two calls.

        Raises:
            RuntimeError: a scheduler has ended.
        """
        return self.thread.submit(lambda: self.engine.loop.run_until_complete(self._watched(work()))).result()

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        while not task.done():
            for process in self.processes:
                if not process.is_alive():
                    task.cancel()
                    raise RuntimeError(f"SGLang's scheduler (process {process.pid}) has ended with exit code "
                                       f"{process.exitcode}; its last words are above. -9: killed, perhaps for lack of "
                                       "memory (see --engine_mem_util, --engine_kv_mib)")
            await asyncio.wait([task], timeout=_LOOK_S)
        return task.result()

    def shutdown(self) -> None:
        """End the schedulers; what they held on the device is free afterwards."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        if self.engine is not None:
            self.thread.submit(_close, self.engine).result()
        self.thread.shutdown()
        signal.signal(signal.SIGQUIT, self._on_quit)


def _start(arguments: dict[str, Any], shapes: Shapes) -> "Engine":
    try:
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import ServerArgs
    except ImportError as error:
        raise UserError(f"--engine_type sglang: cannot import sglang ({error}); run: {INSTALL['sglang']}") from error
    known = set(ServerArgs.__struct_fields__)
    for name in set(arguments) - known:
        raise UserError(f"--engine_args {name}: SGLang has no such argument{did_you_mean(name, known)}")

    class OwnEngine(Engine):
        """Without the process that would turn tokens into text, and without the end of all children."""
        run_scheduler_process_func = staticmethod(partial(sglang_child.run_scheduler, shapes))

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            return [], []

        def shutdown(self) -> None:
            """Registered by SGLang for the end of this process."""

    engine = OwnEngine(**arguments)
    engine.tokenizer_manager._subprocess_watchdog.stop()
    return engine


def _close(engine: "Engine") -> None:
    """Its tasks, its sockets and their files."""
    from sglang.srt.managers.load_snapshot import shm_path_for
    for task in (tasks := asyncio.all_tasks(engine.loop)):
        task.cancel()
    engine.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    engine.send_to_rpc.close(linger=0)
    ports = engine.port_args
    for name in (ports.tokenizer_ipc_name, ports.scheduler_input_ipc_name, ports.detokenizer_ipc_name,
                 ports.rpc_ipc_name, ports.metrics_ipc_name, shm_path_for(ports.instance_id)):  # yapf: disable
        with suppress(FileNotFoundError):
            os.unlink(name.removeprefix("ipc://"))


@contextmanager
def _surroundings(device: torch.device, tp_size: int) -> Iterator[None]:
    """The process as SGLang needs it while it starts: without torchrun's variables, by which its children would look
    for the trainer. Afterwards as it was."""
    root, method = logging.getLogger(), multiprocessing.get_start_method()
    handlers, level, policy = root.handlers[:], root.level, asyncio.get_event_loop_policy()
    with process_state_kept():
        for name in [name for name in os.environ if name.startswith(_LAUNCHER)]:
            del os.environ[name]
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # the few tokens that it wants to spare
        if device.type == "cpu":
            os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}  # compiling takes 20 s there
            if tp_size > 1:
                os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores(tp_size))
        try:
            yield
        finally:
            multiprocessing.set_start_method(method, force=True)
            asyncio.set_event_loop_policy(policy)
            root.handlers[:], root.level = handlers, level


@contextmanager
def _port() -> Iterator[int]:
    """A port where the schedulers can meet, which nobody else is given before they do."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # they may listen beside it, with the same option
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def _cores(parts: int) -> str:
    """Those of this process, dealt to ``parts`` schedulers."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(",".join(map(str, cores[i::parts] or cores)) for i in range(parts))
