"""``torch.cuda`` of the fake device: streams, events, graphs, memory; and the context in which the device exists."""
import ctypes
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

from lightrft.tests.support.fake_cuda import tensor
from lightrft.tests.support.fake_cuda.ledger import EMPTIED, GRAPH, Ledger
from lightrft.tests.support.fake_cuda.tensor import Calls, CAPTURE, Device, Operators

MEMORY = 8 << 30
CAPTURING = set[int]()  # pools that memory is taken from during a capture
QUEUED: list[tuple[Any, ...]] = []  # streams that waited and were entered, and captures with their mode, in order
_ENGINE, _INIT_GROUP = torch.autograd._engine_run_backward, torch.distributed.init_process_group
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static const auto* guard = new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::Lazy>();
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::Lazy, guard);
"""  # autograd asks the guard of a tensor's device for the current stream, and lazy tensors have none


@lru_cache(maxsize=1)
def load_guard() -> None:
    """Build and load the device guard, once per process; skip the test where there is no C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("the fake CUDA device needs a C++ compiler (c++, g++ or clang++)")
    folder, root = Path(mkdtemp(prefix="fake_cuda_")), Path(torch.__file__).parent
    (folder / "guard.cpp").write_text(_GUARD, encoding="ascii")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    paths = [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", abi]
    flags = ["-O0", "-shared", "-fPIC", "-std=c++20", "guard.cpp", "-o", "guard.so"]
    subprocess.run([compiler, *flags, *paths], cwd=folder, check=True)
    ctypes.CDLL(str(folder / "guard.so"))
    shutil.rmtree(folder)


class Stream:
    """A stream; here everything runs at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = tensor.CUDA

    def wait_stream(self, other: "Stream") -> None:
        """Take note of it: the other stream is done."""
        QUEUED.append(("wait", self, other))

    def wait_event(self, event: "Event") -> None:
        """Do nothing: the event has happened."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Return the event."""
        return event or Event()

    def synchronize(self) -> None:
        """Wait, which is counted."""
        tensor.wait()


class _Thread(threading.local):
    """The stream on which a thread runs its operators."""
    stream = Stream()


_THREAD = _Thread()


class Event:
    """An event on a stream; the time between two of them is 0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.recorded = False

    def record(self, stream: Stream | None = None) -> None:
        """Take note of the call."""
        self.recorded = True

    def wait(self, stream: Stream | None = None) -> None:
        """Do nothing: it has happened."""

    def query(self) -> bool:
        """Return True: it has happened."""
        return True

    def elapsed_time(self, other: "Event") -> float:
        """Return the milliseconds to ``other``; an event that was not recorded is an error, as on CUDA."""
        assert self.recorded and other.recorded, "both events must be recorded"
        return 0.0

    def synchronize(self) -> None:
        """Wait, which is counted."""
        tensor.wait()


class Generator:
    """The generator of the device. As in torch 2.11 a capture sets a mode in its state, which only the end of a capture
    without an error takes back; in that mode it draws nothing outside of captures."""

    def __init__(self, capturing: bool = False) -> None:
        self.capturing = capturing

    def clone_state(self) -> "Generator":
        """Return a generator with the same seed and offset; the mode is not copied."""
        return Generator()

    def graphsafe_set_state(self, state: "Generator") -> None:
        """Take the state of another generator."""
        self.capturing = state.capturing


class CUDAGraph:
    """Operators that were recorded, to be run again on the same memory.

    As on CUDA, capture executes nothing: what it has written is put back at its end. A sync within it is an error.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self.steps: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def record(self, func: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator for the shape of its results, and store it."""
        written = [x for x, spec in zip(args, func._schema.arguments) if spec.alias_info and spec.alias_info.is_write]
        outs = [kwargs[spec.name] for spec in func._schema.arguments if spec.alias_info and spec.name in kwargs]
        for x in tree_flatten([written if not func.is_view else [], outs])[0]:
            self.before.setdefault(id(x), (x, x.clone()))
        out = call(*args, **kwargs)
        self.steps.append((call, args, kwargs, out))
        return out

    def capture_begin(self, pool: int, capture_error_mode: str = "global") -> None:
        """Record what runs from now on; its memory comes from ``pool``."""
        assert pool not in CAPTURING, "already recording to this pool"
        CAPTURING.add(pool)
        QUEUED.append(("capture", _THREAD.stream, capture_error_mode))
        torch.cuda.default_generators[0].capturing = True
        self.pool, CAPTURE.recorder = pool, self.record

    def capture_end(self) -> None:
        """End the capture. After an error in it this is an error too, and then memory still comes from the pool."""
        CAPTURE.recorder = None
        for x, content in reversed(self.before.values()):
            x.copy_(content)
        if sys.exc_info()[1] is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        _end_allocate(0, self.pool)
        torch.cuda.default_generators[0].capturing = False

    def replay(self) -> None:
        """Run all operators again; results are written where those of the capture were."""
        tensor.current().add(GRAPH)
        for call, args, kwargs, out in self.steps:
            tree_map(_overwrite, out, call(*args, **kwargs))


def _overwrite(old: Any, new: Any) -> None:
    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
        old.copy_(new)


def _end_allocate(device: int, pool: int) -> None:
    """Let memory no longer come from ``pool``."""
    if pool not in CAPTURING:
        raise RuntimeError("not currently recording to this pool")
    CAPTURING.remove(pool)


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    before, _THREAD.stream = _THREAD.stream, stream or _THREAD.stream
    QUEUED.append(("enter", _THREAD.stream))
    try:
        yield
    finally:
        _THREAD.stream = before


class _EveryThread(threading.Thread):
    """A thread on which the device exists too: torch's modes belong to the thread that entered them."""

    def run(self) -> None:
        """Run in the modes of the device."""
        with Calls(), Operators():
            super().run()


def _engine_with_calls(*args: Any, **kwargs: Any) -> Any:
    """Run a backward pass in which hooks and recomputed forward passes are calls of the program too."""
    with Calls():
        return _ENGINE(*args, **kwargs)


def _init_gloo(backend: str, **kwargs: Any) -> None:
    """Join a group whose collectives run on the content of the tensors; there is no NCCL."""
    _INIT_GROUP("gloo", **kwargs)


def _synchronize(device: Any = None) -> None:
    tensor.wait()


def _api() -> dict[str, Any]:
    """Return what replaces the functions of ``torch.cuda``."""
    properties = SimpleNamespace(name="fake", total_memory=MEMORY, major=9, minor=0, multi_processor_count=1)
    return {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0, "Stream": Stream,
        "Event": Event, "CUDAGraph": CUDAGraph, "stream": _stream, "synchronize": _synchronize,
        "default_generators": (Generator(), ), "current_stream": lambda device=None: _THREAD.stream,
        "default_stream": Stream,
        "graph_pool_handle": partial(next, count()),
        "is_current_stream_capturing": lambda: CAPTURE.recorder is not None, "ipc_collect": lambda: None,
        "empty_cache": lambda: tensor.current().add(EMPTIED),
        "set_device": lambda device: None, "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "max_memory_allocated": lambda device=None: 0, "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0, "reset_peak_memory_stats": lambda device=None: None,
        "get_device_properties": lambda device=None: properties, "get_device_name": lambda device=None: "fake",
        "get_device_capability": lambda device=None: (9, 0), "get_rng_state_all": lambda: [],
        "get_rng_state": lambda device=None: torch.get_rng_state(), "set_rng_state": lambda state, device=None: None,
        "is_bf16_supported": lambda *args, **kwargs: True,
    }  # yapf: disable


@contextmanager
def fake_cuda() -> Iterator[Ledger]:
    """Context in which ``torch.cuda`` is available and "cuda" is the fake device; gives the ledger of its use."""
    load_guard()
    QUEUED.clear()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in _api().items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(torch._C, "_cuda_endAllocateToPool", _end_allocate, raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", lambda device, pool: None, raising=False)
        patch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self)
        patch.setattr(torch.distributed, "init_process_group", _init_gloo)
        for name in ("device", "is_cuda"):  # a sharded tensor asks torch, which knows the lazy device only
            patch.setattr(DTensor, name, property(lambda x, name=name: getattr(x._local_tensor, name)), raising=False)
        patch.setattr(torch.autograd, "_engine_run_backward", _engine_with_calls)
        patch.setattr(threading, "Thread", _EveryThread)
        patch.setattr(Device, "ledger", Ledger())
        patch.setattr(torch, "_has_compatible_shallow_copy_type", lambda old, new: True)  # so modules assign .data
        stack.enter_context(Calls())
        stack.enter_context(Operators())
        yield tensor.current()
