"""``lightrft.cli.train`` and other commands in real processes, for tests that kill and break runs.

Processes are forked from one server that has imported everything, so a start takes a fraction of a second; otherwise
they are what torchrun starts (environment, store, process groups of their own, output in files).
"""
import faulthandler
import gc
import multiprocessing
import os
import re
import resource
import runpy
import signal
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightrft.tests.support.planned_too import plan_refusals

ROOT = Path(__file__).parents[3]
_CONTEXT = multiprocessing.get_context("forkserver")
# pyarrow imports pandas, where it is installed, to make a table
_PRELOAD = [
    "pandas", "peft", "torch.distributed.checkpoint", "torch.utils.tensorboard", "matplotlib.backends.backend_agg",
    "matplotlib.figure", "transformers.models.auto.modeling_auto", "transformers.models.qwen2.modeling_qwen2",
    "lightrft.cli.train", "lightrft.models.lora", "lightrft.preflight.checks.run_plan", "lightrft.preflight.report",
    "lightrft.rollout.hf.engine", "lightrft.strategy.strategy", "lightrft.strategy.fsdp", "lightrft.trainer.session",
    "lightrft.trainer.spmd_ppo_trainer", "lightrft.tests.support.warmed"
]
_CONTEXT.set_forkserver_preload(_PRELOAD)


def preload(*modules: str) -> None:
    """Let the server import these too, from now on."""
    forkserver._forkserver._stop()
    _CONTEXT.set_forkserver_preload([*_PRELOAD, *modules])


def flags(options: dict[str, Any]) -> list[str]:
    """Options as words of the command line; lists with commas, True as a bare flag."""
    words: list[str] = []
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return words


def _child(module: str, argv: list[str], environ: dict[str, str], folder: str, log: str, limits: dict[int,
                                                                                                      int]) -> None:
    """Become the process that ``python -m MODULE`` would be, or ``python SCRIPT``; curves are not drawn, and what the
    server has imported is not searched for garbage. Each of the two can take longer than a run."""
    os.setpgid(0, 0)
    gc.freeze()
    import_module("lightrft.trainer.run_log").plot_curve = lambda *args: None  # the server has imported it
    for which, most in limits.items():
        resource.setrlimit(which, (most, most))
    os.environ.update(environ)
    os.chdir(folder)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    plan_refusals()
    if module.startswith("lightrft.cli."):
        import_module(module).main(argv)
        return
    sys.argv[:] = [module, *argv]
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent))
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


@dataclass
class Launched:
    """The ranks of one run."""
    processes: list[Any]
    logs: list[Path]
    store: Any = None

    def wait(self, limit_s: float = 60.0) -> list[int]:
        """Exit codes, by rank; what still runs after ``limit_s`` is killed and fails the test."""
        end = time.monotonic() + limit_s
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        if late:
            self.kill()
            raise AssertionError(f"rank {late} still ran after {limit_s:.0f} s\n{self.output}")
        return [process.exitcode for process in self.processes]

    def signal(self, number: int, rank: int | None = None) -> None:
        """To the process group of one rank, or of all."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def kill(self) -> None:
        """``kill -9`` to every rank at once."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def until(self, text: str, limit_s: float = 60.0) -> None:
        """Wait until rank 0 has written ``text``, or the run is over."""
        end = time.monotonic() + limit_s
        while text not in self.log(0) and self.processes[0].is_alive() and time.monotonic() < end:
            time.sleep(0.01)

    def log(self, rank: int) -> str:
        """The output of a rank so far."""
        return self.logs[rank].read_text(errors="replace") if self.logs[rank].exists() else ""

    @property
    def output(self) -> str:
        """All of it."""
        return "\n".join(f"--- rank {rank} ---\n{self.log(rank)}" for rank in range(len(self.logs)))


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _fork(run: Launched, module: str, words: list[str], folder: Path, environ: dict[str, str], by_hand: bool = False,
          limits: dict[int, int] | None = None) -> Launched:
    """Start the ranks of ``run``, with the environment that torchrun would give them."""
    common, ranks = {"OMP_NUM_THREADS": "1", **environ}, len(run.logs)
    if ranks > 1:
        run.store = None if by_hand else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(run.store.port) if run.store else free_port(), "WORLD_SIZE":
            str(ranks), "LOCAL_WORLD_SIZE": "1" if by_hand else str(ranks), "TORCHELASTIC_USE_AGENT_STORE":
            str(not by_hand)
        }
    for rank in range(ranks):
        own = common | ({"RANK": str(rank), "LOCAL_RANK": "0" if by_hand else str(rank)} if ranks > 1 else {})
        arguments = (module, words, own, str(folder), str(run.logs[rank]), limits or {})
        process = _CONTEXT.Process(target=_child, args=arguments)
        process.start()
        run.processes.append(process)
    return run


def launch(folder: Path, options: dict[str, Any], ranks: int = 1, limits: dict[int, int] | None = None,
           by_hand: bool = False, module: str = "lightrft.cli.train", **environ: str) -> Launched:
    """Start ``module`` in ``folder`` on ``ranks`` ranks, under resource ``limits``; ``by_hand``: each on a
    machine of its own, without torchrun and its store, so that the first rank has to serve one."""
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("*_rank_0.log")))
    run = Launched([], [folder / f"{number}_rank_{rank}.log" for rank in range(ranks)])
    return _fork(run, module, flags(options), folder, environ, by_hand, limits)


def _end_of(log: str, most: int = 3000) -> str:
    """The end of a log; of a process that a signal ended, what Python was doing, without its list of modules."""
    fatal = log.rfind("Fatal Python error")
    return log[-most:] if fatal < 0 else log[fatal:].partition("Extension modules")[0][:most]


def torchrun(module: str, *words: object, ranks: int = 2, limit_s: float = 240.0, **environ: str) -> str:
    """Run ``python -m module words`` on ``ranks`` ranks to their good end; the output of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        run = Launched([], [Path(folder) / f"{rank}.log" for rank in range(ranks)])
        codes = _fork(run, module, [str(word) for word in words], Path.cwd(), environ).wait(limit_s)
        # A rank that a signal ended comes first: the others only say that it is gone.
        order = sorted(range(ranks), key=codes.__getitem__)
        logs = [f"--- rank {rank} ---\n{_end_of(run.log(rank))}" for rank in order]
        assert codes == [0] * ranks, f"exit codes {codes}\n" + "\n".join(logs)
        return run.log(0)


def finish(folder: Path, options: dict[str, Any], ranks: int = 1, limit_s: float = 90.0, **environ: str) -> Launched:
    """A run to its good end."""
    run = launch(folder, options, ranks, **environ)
    codes = run.wait(limit_s)
    assert codes == [0] * ranks, f"exit codes {codes}\n{run.output}"
    return run


def start(target: Path | str, words: list[str], log: Path) -> Launched:
    """Start a script of the repository, or ``python -m`` a module, with ``words``, in the current folder."""
    run = Launched([], [log])
    arguments = (str(target), words, {"OMP_NUM_THREADS": "1"}, os.getcwd(), str(log), {})
    run.processes.append(_CONTEXT.Process(target=_child, args=arguments))
    run.processes[0].start()
    return run


def run_script(path: Path, *words: object, limit_s: float = 120.0) -> None:
    """Run a script of the repository to its good end, in the current folder."""
    with tempfile.TemporaryDirectory() as folder:
        run = start(path, [str(word) for word in words], Path(folder) / "log")
        assert run.wait(limit_s) == [0], run.output


def workers(folder: Path) -> list[int]:
    """Workers of rewards and environments alive that were started by runs in ``folder`` (they inherit its working
    directory)."""
    found, code = [], b".worker import main"
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "cwd").resolve() == folder.resolve() and code in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def no_orphans(folder: Path, limit_s: float = 20.0) -> bool:
    """True if every worker of ``folder`` is gone within ``limit_s``."""
    end = time.monotonic() + limit_s
    while workers(folder) and time.monotonic() < end:
        time.sleep(0.1)
    return not workers(folder)


def errors(text: str) -> list[str]:
    """The error lines of a log."""
    return [line for line in text.splitlines() if re.search(r"(ERROR|error): ", line)]


PYTHON = [sys.executable, "-m", "lightrft.cli.train"]
