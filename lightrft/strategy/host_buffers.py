"""Host memory for tensors that leave the device."""
import ctypes
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from mmap import mmap
from weakref import finalize

import torch
from torch import nn, Tensor

from lightrft.utils.errors import ExpectedError

SLAB_BYTES = 4 << 30
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for the contexts of all GPUs
_ALIGN = 512  # bytes between the starts of tensors, as the device's allocator has


def pinned(nbytes: int) -> Tensor:
    """Allocate bytes that the device copies to and from without blocking, where there is one.

    torch rounds pinned memory up to a power of two, so other sizes are pinned in place.
    """
    cuda = torch.cuda.is_available()
    if cuda and nbytes & (nbytes - 1):
        return _pinned_in_place(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=cuda)


def _pinned_in_place(nbytes: int) -> Tensor:
    """Pin a mapping of ``nbytes``, which ends with the last tensor that uses it. It is shared, so that processes forked
    later do not move its pages.

    Raises:
        ExpectedError: the system does not let this process pin it.
    """
    cuda = torch.cuda.cudart()
    block = (ctypes.c_char * nbytes).from_buffer(mmap(-1, nbytes))  # its end comes before that of the mapping
    memory = torch.frombuffer(block, dtype=torch.uint8)
    if code := int(cuda.cudaHostRegister(memory.data_ptr(), nbytes, _PORTABLE)):
        raise ExpectedError(f"{nbytes / (1 << 30):.1f} GiB of host memory cannot be pinned (CUDA error {code}): free "
                            "some, raise ulimit -l, or run without --adam_offload and --offload_during_rollout")
    finalize(block, cuda.cudaHostUnregister, memory.data_ptr()).atexit = False  # the process takes CUDA along
    return memory


class Slabs:
    """Buffers cut from large ones, whose sizes are powers of two.

    torch rounds pinned memory up to powers of two. One buffer per tensor took nearly twice the size of the tensors;
    here the rest of a buffer holds other tensors. Slabs grow with what they hold, up to :data:`SLAB_BYTES`; a larger
    tensor gets one of its own size.
    """

    def __init__(self, allocate: Callable[[int], Tensor] = pinned) -> None:
        self.allocate, self.taken = allocate, 0
        self.rests: list[Tensor] = []  # unused ends of slabs

    def like(self, tensor: Tensor) -> Tensor:
        """Return a contiguous buffer with the shape and type of ``tensor``."""
        size = -(-tensor.nbytes // _ALIGN) * _ALIGN
        found = next((i for i, rest in enumerate(self.rests) if len(rest) >= size), None)
        if found is None:
            wanted = max(size, min(SLAB_BYTES, self.taken))
            slab_bytes = wanted if wanted > SLAB_BYTES else 1 << (wanted - 1).bit_length()
            found, self.rests = len(self.rests), [*self.rests, self.allocate(slab_bytes)]
        slab = self.rests[found]
        self.rests[found], self.taken = slab[size:], self.taken + size
        return slab[:tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class HostBuffers:
    """Pinned host memory for tensors that leave the device: one buffer per tensor, allocated at its first use.

    Copies between pinned memory and the device do not block. They, the kernels that use the tensors, and the reuse of
    freed device memory are queued on the current stream and keep their order there, so a buffer is overwritten only
    after the copy that read it. The host is not part of that order: it may read a buffer only after :meth:`wait`,
    which callers run once, after the last copy. A thread with a stream of its own must not move tensors.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}
        self._slabs, self._queued = Slabs(), False

    def store(self, key: Hashable, tensor: Tensor, frozen: bool = False) -> Tensor:
        """Queue a copy of ``tensor`` and return the buffer of ``key``; what is in host memory is returned as it is, and
        what is ``frozen`` is copied once."""
        if tensor.device.type == "cpu":
            return tensor
        if frozen and key in self._buffers:
            return self._buffers[key]
        if key not in self._buffers:
            self._buffers[key] = self._slabs.like(tensor)
        self._queued = True
        return self._buffers[key].copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Wait for the queued copies, so that the host can read the buffers."""
        if self._queued and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._queued = False


class VisitingWeights:
    """Weights and buffers of a model that is not trained, which rests in pinned host memory and visits a device.

    The host copy stays: a visit copies it to the device, and its end frees memory there and moves nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, slabs = model, Slabs()
        self.held = {name: slabs.like(tensor).copy_(tensor.detach()) for name, tensor in self._named()}
        self.to(torch.device("cpu"))

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return chain(self.model.named_parameters(), self.model.named_buffers())

    def to(self, device: torch.device) -> None:
        """Let the model have its weights on ``device``; copies are queued there."""
        held = {id(tensor): self.held[name] for name, tensor in self._named() if name in self.held}

        def moved(tensor: Tensor) -> Tensor:
            return held.get(id(tensor), tensor).to(device, non_blocking=device.type == "cuda")

        self.model._apply(moved)
