"""Checkpoints of the tensors that DeepSpeed divides: the same tensors and names as every strategy saves.

Flat partitions are joined bucket by bucket, of which each rank keeps its rows in host memory, and cut again when they
are loaded. So a checkpoint fits any stage, any number of ranks and any other strategy.
"""
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightrft.strategy.deepspeed.partitions import ZeroAdamW
from lightrft.strategy import collectives
from lightrft.strategy.optimizer import MOMENTS, full_shape

BUCKET_BYTES = 64 << 20
Named = tuple[str, Tensor]


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


def whole_moments(optimizer: ZeroAdamW, key: str, device: torch.device) -> Iterator[Named]:
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


def save_moments(optimizer: ZeroAdamW, mesh: DeviceMesh, device: torch.device) -> dict[str, Tensor]:
    """``{"<name>/<key>": tensor}`` as :meth:`LocalAdamW.named_state` has it; both moments as rows in host memory."""
    rows = {f"{name}/{key}": own_rows(whole, mesh)
            for key in MOMENTS for name, whole in whole_moments(optimizer, key, device)}  # yapf: disable
    return {f"{name}/{key}": rows.get(f"{name}/{key}", value) for name, key, value in optimizer.moments()}


def load_moments(optimizer: ZeroAdamW, state: dict[str, Tensor], device: torch.device) -> None:
    """Undo :func:`save_moments`. Parameters of one partition share one number of steps."""
    own = {f"{name}/{key}": value for name, key, value in optimizer.moments()}
    for name in optimizer.owners:
        own[f"{name}/step"].copy_(state[f"{name}/step"])
    for key, whole in from_rows(((key, value) for key, value in state.items() if isinstance(value, DTensor)), device):
        one = optimizer.partitions.slices[key.rpartition("/")[0]]
        own[key].copy_(whole[one.start:one.start + one.count])
