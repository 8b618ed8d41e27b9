"""Elements of every trained parameter in the partitions that DeepSpeed optimizes on this rank, and in checkpoints.

DeepSpeed flattens parameters and cuts the result, so a rank's part of a parameter is a slice of its elements, in
row-major order, and may be empty.

A checkpoint holds the same tensors and names as every strategy saves: flat partitions are joined bucket by bucket, of
which each rank keeps its rows in host memory, and cut again when they are loaded. So a checkpoint fits any stage, any
number of ranks and any other strategy.
"""
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightrft.strategy import collectives
from lightrft.strategy.optimizer import LocalOptimizer
from lightrft.strategy.sharding import full_shape

BUCKET_BYTES = 64 << 20
Named = tuple[str, Tensor]
NO_MICRO_BATCH = -1  # stages 1 and 2 count micro-batches from here


class PartitionSlice(NamedTuple):
    """Slice of a flattened parameter, ``count`` elements from ``start`` on, stored in partition ``index`` from
    ``offset`` on."""
    index: int  # type: ignore[assignment]  # hides the method of tuples
    offset: int
    start: int
    count: int  # type: ignore[assignment]  # so does this

    def of(self, partition: Tensor) -> Tensor:
        """The elements, sharing storage with the partition."""
        return partition.narrow(0, self.offset, self.count)


class Partitions(ABC):
    """Partitions that DeepSpeed's optimizer of one model holds.

    Args:
        zero: the optimizer that DeepSpeed made.
        names: names of the trained parameters.
        rank: this process.
    """
    masters: list[Any]  # tensors: float32 weights, flat, as the optimizer updates them

    def __init__(self, zero: Any, names: dict[Any, str], rank: int, offloaded: bool) -> None:
        self.zero, self.names, self.rank, self.offloaded = zero, names, rank, offloaded
        self.slices = dict(self._slices())

    @abstractmethod
    def _slices(self) -> Iterator[tuple[str, PartitionSlice]]:
        """Name and slice of every trained parameter."""

    @abstractmethod
    def _reduced(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """This rank's part of the gradients, summed over ranks; perhaps padded."""

    def grads(self) -> dict[str, Tensor]:
        """This rank's part of every gradient, sharing storage with what DeepSpeed's step reads."""
        if self.offloaded:
            self._wait_for_copies()
            return {name: one.of(self.masters[one.index].grad) for name, one in self.slices.items() if one.count}
        found = ((self.names[param], grad.view(-1)) for param, grad in self._reduced())
        return {name: grad[:self.slices[name].count] for name, grad in found}

    def _wait_for_copies(self) -> None:
        """Wait for the gradients that the device still copies to host memory. DeepSpeed's stages 1 and 2 let the host
        run ahead of these copies, and wait in their own step only."""
        if hasattr(self.zero, "_wait_for_offload_copies"):
            self.zero._wait_for_offload_copies()
        elif torch.cuda.is_available():  # stage 3
            torch.cuda.synchronize()

    @abstractmethod
    def refresh(self) -> None:
        """Copy the weights that the model computes with to the masters, where these are separate."""

    @abstractmethod
    def move(self, to: Callable[[Tensor], Tensor]) -> None:
        """Give the trained weights, and masters that share their storage, the storage that ``to`` returns."""

    def clear(self) -> None:
        """Drop all gradients."""
        self.zero.zero_grad()
        if self.offloaded:
            self.zero.reset_cpu_buffers()
            for master in self.masters:
                master.grad.zero_()


class Stage1Or2(Partitions):
    """Each group of parameters is one flat tensor, cut into as many pieces as there are ranks."""

    def __init__(self, zero: Any, names: dict[Any, str], rank: int, offloaded: bool) -> None:
        self.masters = zero.single_partition_of_fp32_groups
        super().__init__(zero, names, rank, offloaded)
        self._share()

    def _share(self) -> None:
        """Let the masters share the model's weights, which are float32 already, where both are on the same device."""
        if not self.offloaded:
            for master, pieces in zip(self.masters, self.zero.parallel_partitioned_bit16_groups):
                master.data = pieces[self.rank]

    def move(self, to: Callable[[Tensor], Tensor]) -> None:
        """Move the flat weights of each group, and point the model's to them."""
        for index, flat in enumerate(self.zero.bit16_groups_flat):
            flat.data = to(flat)
            self.zero.parallel_partitioned_bit16_groups[index] = self.zero.get_data_parallel_partitions(flat, index)
            self.zero._update_model_bit16_weights(index)
        self._share()

    def _slices(self) -> Iterator[tuple[str, PartitionSlice]]:
        for index, group in enumerate(self.zero.bit16_groups):
            size = int(self.zero.partition_size[index])
            offset = -self.rank * size  # of the parameter's first element in this rank's piece
            for param in group:
                first, end = max(0, offset), min(size, offset + param.numel())
                yield self.names[param], PartitionSlice(index, min(first, size), max(0, -offset), max(0, end - first))
                offset += param.numel()

    def _reduced(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for index, params in enumerate(self.zero.params_in_partition):
            yield from zip(params, self.zero.averaged_gradients.get(index) or ())

    def clear(self) -> None:
        """Forget the gradients of all groups."""
        super().clear()
        self.zero.micro_step_id = NO_MICRO_BATCH
        for held in (self.zero.averaged_gradients, self.zero.all_grad_tensors):
            held.update(dict.fromkeys(held))

    def refresh(self) -> None:
        """Copy this rank's pieces of the model's weights to the masters."""
        for master, pieces in zip(self.masters, self.zero.parallel_partitioned_bit16_groups):
            master.detach().copy_(pieces[self.rank])


class Stage3(Partitions):
    """Each parameter is cut into as many pieces as there are ranks, all of one size; the last may be padded."""

    def __init__(self, zero: Any, names: dict[Any, str], rank: int, offloaded: bool) -> None:
        self.masters = zero.fp32_partitioned_groups_flat
        super().__init__(zero, names, rank, offloaded)

    def _slices(self) -> Iterator[tuple[str, PartitionSlice]]:
        for index, group in enumerate(self.zero.fp16_groups):
            offset = 0
            for param in group:
                start, count = span(param, self.rank)
                yield self.names[param], PartitionSlice(index, offset, start, count)
                offset += param.ds_tensor.numel()

    def _reduced(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for index, params in enumerate(self.zero.fp16_groups):
            yield from zip(params, self.zero.averaged_gradients.get(index) or ())

    def clear(self) -> None:
        """Extend :meth:`Partitions.clear`: gradients of parameters that a step does not reach would be used again."""
        super().clear()
        self.zero.averaged_gradients = {}
        self.zero.grad_partitions_flat_buffer.zero_()

    def move(self, to: Callable[[Tensor], Tensor]) -> None:
        """Move the flat weights and this rank's pieces of each parameter."""
        buffer = self.zero.lp_param_buffer
        buffer.data = to(buffer)
        pieces = [param.ds_tensor for params in self.zero.fp16_groups for param in params]
        for piece, data in zip(pieces, buffer.split([piece.numel() for piece in pieces])):
            piece.data = data
        flats = self.zero.fp16_partitioned_groups_flat
        for index, data in enumerate(buffer.split([flat.numel() for flat in flats])):
            flats[index] = data
            if not self.offloaded:
                self.masters[index].data = data

    def refresh(self) -> None:
        """Copy this rank's pieces of each parameter to the masters."""
        self.zero.invalidate_secondary_tensor()
        for param, name in self.names.items():
            one = self.slices[name]
            one.of(self.masters[one.index].detach()).copy_(param.ds_tensor[:one.count])


def span(param: Any, rank: int) -> tuple[int, int]:
    """First element that ``rank`` holds of a parameter of stage 3, and the number of its elements."""
    start = min(rank * param.ds_tensor.numel(), param.ds_numel)
    return start, min(param.ds_tensor.numel(), param.ds_numel - start)


class ReadParams:
    """Names of the parameters that got a gradient from a backward pass; DeepSpeed takes no gradient for one of zeros.
    """

    def __init__(self, named_params: Mapping[str, nn.Parameter]) -> None:
        self.names: set[str] = set()
        for name, param in named_params.items():
            param.register_post_accumulate_grad_hook(lambda _, name=name: self.names.add(name))


class ZeroOptimizer(LocalOptimizer):
    """The optimizer on DeepSpeed's partitions, with its gradients and state under parameter names.

    ``unread``: names of parameters without a gradient, whose elements of the partitions the next step leaves alone.
    """
    partitions: Partitions
    unread: Collection[str] = ()

    def step(self, closure: Any = None) -> Any:
        """Extend :meth:`LocalOptimizer.step`: neither weight decay nor momentum moves what is ``unread``."""
        stepped = [master for group in self.param_groups for master in group["params"]]
        self._start(stepped)
        kept = [(part, part.clone()) for part in self._unread_parts(stepped)]
        super().step(closure)
        for part, before in kept:
            part.copy_(before)

    def _unread_parts(self, stepped: list[Tensor]) -> Iterator[Tensor]:
        """Weights and moments of what is ``unread``, in those partitions that the next step updates."""
        for one in map(self.partitions.slices.__getitem__, self.unread):
            master = self.partitions.masters[one.index]
            if any(master is other for other in stepped):
                yield from (one.of(tensor.detach())
                            for tensor in (master, *map(self.state[master].get, self.moment_names))
                            if tensor is not None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.partitions.clear()
        self.backwards = 0

    def named_grads(self) -> dict[str, Tensor]:
        """This rank's part of every gradient: slices of flattened parameters."""
        return self.partitions.grads()

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        """Override :meth:`LocalOptimizer.moments`; this rank's slices of the moments."""
        for name in self.owners:
            one = self.partitions.slices[name]
            state = self.started(self.partitions.masters[one.index])
            yield name, "step", state["step"]
            yield from ((name, key, one.of(state[key])) for key in self.moment_names)


def own_rows(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Convert ``whole`` to a DTensor, of which this rank keeps its rows, copied to host memory."""
    size = -(-whole.shape[0] // mesh.size())
    first = mesh.get_local_rank() * size
    rows = whole[first:first + size].to("cpu", copy=True).contiguous()
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=stride)


def from_rows(rows: Iterable[tuple[str, DTensor]], device: torch.device) -> Iterator[Named]:
    """Gather the whole tensors, flattened; a collective."""
    for bucket in collectives.buckets(rows, BUCKET_BYTES):
        yield from ((name, whole.reshape(-1)) for name, whole in collectives.gather_bucket(bucket, device))


def whole_moments(optimizer: ZeroOptimizer, key: str, device: torch.device) -> Iterator[Named]:
    """One moment of every trained parameter, in its full shape; a collective."""
    shapes = {name: full_shape(param) for name, param in optimizer.owners.items()}
    own = {name: tensor for name, one, tensor in optimizer.moments() if one == key}
    sized = ((name, torch.empty(shape, device="meta")) for name, shape in shapes.items())
    for bucket in collectives.buckets(sized, BUCKET_BYTES):
        parts = [torch.zeros(shapes[name].numel(), device=device) for name, _ in bucket]
        for (name, _), part in zip(bucket, parts):
            one = optimizer.partitions.slices[name]
            part[one.start:one.start + one.count] = own[name]
        summed = collectives.all_reduce(torch.cat(parts), "sum").split([len(part) for part in parts])
        yield from ((name, flat.view(shapes[name])) for (name, _), flat in zip(bucket, summed))


def save_moments(optimizer: ZeroOptimizer, mesh: DeviceMesh, device: torch.device) -> dict[str, Tensor]:
    """``{"<name>/<key>": tensor}`` as :meth:`LocalOptimizer.named_state` has it; moments as rows in host memory."""
    rows = {f"{name}/{key}": own_rows(whole, mesh)
            for key in optimizer.moment_names for name, whole in whole_moments(optimizer, key, device)}  # yapf: disable
    return {f"{name}/{key}": rows.get(f"{name}/{key}", value) for name, key, value in optimizer.moments()}


def load_moments(optimizer: ZeroOptimizer, state: dict[str, Tensor], device: torch.device) -> None:
    """Undo :func:`save_moments`. Parameters of one partition share one number of steps."""
    own = {f"{name}/{key}": value for name, key, value in optimizer.moments()}
    for name in optimizer.owners:
        own[f"{name}/step"].copy_(state[f"{name}/step"])
    for key, whole in from_rows(((key, value) for key, value in state.items() if isinstance(value, DTensor)), device):
        one = optimizer.partitions.slices[key.rpartition("/")[0]]
        own[key].copy_(whole[one.start:one.start + one.count])
