"""Tensors on meshes of four ranks in one and two dimensions, divided in every way (test_sharding.py)."""
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module, RowwiseParallel
from torch.distributed.tensor.placement_types import _StridedShard

from lightrft.config.schema import OptimConfig, StrategyConfig
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.tree import build
from lightrft.ops.fingerprint import fingerprints, Piece
from lightrft.strategy import collectives
from lightrft.strategy.base import Prepared
from lightrft.strategy.checkpoint import CheckpointManager
from lightrft.strategy.fsdp import FSDPV2Strategy, Placement, shard, WrapPolicy
from lightrft.strategy.materialize import materialize
from lightrft.strategy.mesh import Axes
from lightrft.strategy.optimizer import create_scheduler, LocalOptimizer, OptimSpec
from lightrft.strategy.sharding import like, local, own_slice
from lightrft.strategy.strategy import SingleProcessStrategy
from lightrft.tests.support.data_ranks import data_ranks
from lightrft.tests.support.sharded import full
from lightrft.tests.support.tiny_lm import placed

# even, uneven, fewer rows than ranks, one row, a vector, a cube; on meshes with an axis of one rank one of them
SHAPES = {(4, ): [(8, 6), (5, 3), (3, 9), (1, 2), (7, ), (4, 3, 5)], (2, 2): [(5, 9), (3, 4)], (1, 4): [(5, 3)],
          (4, 1): [(5, 3)]}  # yapf: disable
PLACEMENTS: list[Any] = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2),
                         _StridedShard(1, split_factor=3)]  # yapf: disable
SPEC = OptimSpec(0.1, OptimConfig(l2=0.1))


def whole_of(number: int, shape: tuple[int, ...]) -> Tensor:
    """Values that no other tensor and no other element has."""
    return torch.arange(1, torch.Size(shape).numel() + 1).view(shape).float() + 1000 * number


def divided(whole: Tensor, mesh: DeviceMesh, placements: tuple[Any, ...]) -> DTensor:
    """This rank's shard, cut by torch itself, axis after axis."""
    part = whole
    for size, index, placement in zip(mesh.shape, mesh.get_coordinate() or (), placements):
        if not placement.is_replicate():
            part = placement._split_tensor(part, size, with_padding=False)[0][index]
    return DTensor.from_local(part.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def cases() -> Iterator[tuple[str, Tensor, DTensor]]:
    """Name, whole tensor and DTensor of every shape in every layout, on the meshes of weights and of experts, and on
    meshes with an axis of one rank."""
    number, divided_experts = 0, FSDPV2Strategy(StrategyConfig(strategy="fsdp"), ranks=[0, 1, 2, 3], axes=Axes(ep=2))
    divided_experts.setup()
    meshes = {(4, ): divided_experts.mesh.dense(), (2, 2): divided_experts.mesh.experts()}
    assert [mesh.mesh_dim_names for mesh in meshes.values()] == [("shard", ), ("efsdp", "ep")]
    for ranks, shapes in SHAPES.items():
        mesh = meshes[ranks] if ranks in meshes else init_device_mesh("cpu", ranks)
        chosen = PLACEMENTS if 1 not in ranks else PLACEMENTS[::2]
        for shape, placements in product(shapes, product(chosen, repeat=mesh.ndim)):
            if all(placement.is_replicate() or placement.dim < len(shape) for placement in placements):
                whole, number = whole_of(number, shape), number + 1
                yield f"{number}: {shape} {tuple(mesh.shape)} {placements}", whole, divided(whole, mesh, placements)


class Holder(nn.Module):
    """A module with these parameters, which it can also read as if from files."""

    def __init__(self, params: list[Tensor], wholes: list[Tensor]) -> None:
        super().__init__()
        self.params, self.wholes = nn.ParameterList(map(nn.Parameter, params)), wholes

    def read(self, name: str, at: tuple[slice, ...]) -> Tensor:
        return self.wholes[int(name.removeprefix("params."))][at]


def prepared_of(strategy: Any, model: nn.Module) -> Prepared:
    if isinstance(strategy, FSDPV2Strategy):
        strategy._placements[model] = Placement([], True, False)
    optimizer = LocalOptimizer(model.named_parameters(), SPEC)
    return Prepared(model, optimizer, create_scheduler(optimizer, SPEC))


def slices_gathers_and_files(strategy: FSDPV2Strategy, names: list[str], wholes: list[Tensor],
                             tensors: list[DTensor]) -> None:
    """Every element has one responsible rank; gathered tensors, values from files and fingerprints are exact."""
    slices = [own_slice(tensor) for tensor in tensors]
    summed = strategy.all_reduce(torch.cat([placed(part).flatten() for part in slices]))
    sums = torch.stack([fingerprints(list(part.pieces)).sum() if part.pieces else torch.tensor(0) for part in slices])
    right = fingerprints([Piece(whole) for whole in wholes])
    sums = strategy.all_reduce(sums)
    for name, whole, found, mine, expected in zip(names, wholes, summed.split([w.numel() for w in wholes]), sums,
                                                  right):
        assert torch.equal(found.view(whole.shape), whole), f"slices of {name}: {found}"
        assert mine == expected, f"fingerprint of {name}"
    for nbytes in (1, 1 << 20):
        gathered = [pair for bucket in collectives.buckets(zip(names, tensors), nbytes)
                    for pair in collectives.gather_bucket(bucket, strategy.device)]  # yapf: disable
        for name, whole, (other, found) in zip(names, wholes, gathered, strict=True):
            assert name == other and torch.equal(found, whole), f"gathered {name}: {found}"
    columns = next(tensor for tensor in tensors if tensor.placements == (Shard(1), ))
    with pytest.raises(ValueError, match=r"a shard of \[8, 1\] does not fit one of \[8, \d\]"):
        like(torch.zeros(8, 1), columns)  # a scale per row: rows that are cut have none
    summands = DTensor.from_local(torch.zeros(2), columns.device_mesh, (Partial(), ), run_check=False)
    with pytest.raises(ValueError, match="not yet summed over its ranks"):
        own_slice(summands)
    for name, whole, tensor in list(zip(names, wholes, tensors))[::7]:
        assert torch.equal(full(tensor), whole), f"full {name}"
    empty = [DTensor(torch.empty_like(local(t), device="meta"), t._spec, requires_grad=False) for t in tensors]
    model = Holder(empty, wholes)
    materialize(model, strategy.device)
    for name, tensor, param in zip(names, tensors, model.params):
        assert torch.equal(local(param), local(tensor)) and param.placements == tensor.placements, f"read {name}"


def norms_and_updates(strategy: FSDPV2Strategy, wholes: list[Tensor], tensors: list[DTensor]) -> None:
    """A step of AdamW on every layout at once is that of one process: norm, clipping, weights and moments."""
    alone, ours = SingleProcessStrategy(), strategy
    models = {alone: Holder([whole / 1000 for whole in wholes], []), ours: Holder([t / 1000 for t in tensors], [])}
    prepared = {which: prepared_of(which, model) for which, model in models.items()}
    for model in models.values():
        for param in model.params:
            param.grad = param.detach() * 3 + 1
    grads = {which: which.gradients(one) for which, one in prepared.items()}
    expected = alone.global_norm(prepared[alone], grads[alone])
    assert ours.global_norm(prepared[ours], grads[ours]) == pytest.approx(expected, rel=1e-6)
    norms = [which.optimizer_step(one, expected / 2) for which, one in prepared.items()]
    assert norms == pytest.approx([expected, expected], rel=1e-6)
    right = dict(alone.gathered(models[alone], 1 << 20))
    for name, found in ours.gathered(models[ours], 1 << 20):
        assert torch.allclose(found, right[name], rtol=1e-5), f"weight {name} after a step"
    moments, expected_state = ours.state_dict(prepared[ours]), alone.state_dict(prepared[alone])
    layouts = {f"optim/{name}/exp_avg": param for name, param in models[ours].named_parameters()}
    sharded = [(key, moments[key]) for key in layouts]
    assert all(moments[key].placements == param.placements for key, param in layouts.items())
    for key, found in (pair for bucket in collectives.buckets(sharded, 1 << 20)
                       for pair in collectives.gather_bucket(bucket, ours.device)):
        assert torch.allclose(found, expected_state[key], rtol=1e-5), key


def eight_bits(tensors: list[DTensor]) -> None:
    """8-bit moments are refused for exactly those layouts that cut rows."""
    spec = OptimSpec(0.1, build(SFTConfig, {"optim": "adamw_8bit"}).train)
    for tensor in tensors[::3]:
        cut = any(not each.is_replicate() and each.dim and size > 1
                  for each, size in zip(tensor.placements, tensor.device_mesh.shape))  # yapf: disable
        with pytest.raises(ValueError, match="parts of the rows of weight, .* --optim adamw") if cut else nullcontext():
            LocalOptimizer([("weight", nn.Parameter(tensor))], spec)


def tensor_parallel(strategy: FSDPV2Strategy, folder: Path) -> None:
    """FSDP2 around tensor parallel layers on (shard, tp): three steps are those of one process, also across a
    checkpoint that one process reads."""
    strategy.axes, alone = Axes(tp=2), SingleProcessStrategy()
    mesh, data = strategy.mesh.dense(), strategy.mesh.data
    models = {which: mlp() for which in (alone, strategy)}
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(models[strategy], mesh["tp"], plan)
    placement = shard(models[strategy], mesh["shard"], WrapPolicy(), False, False)
    prepared = {which: prepared_of(which, model) for which, model in models.items()}
    strategy._placements[models[strategy]] = placement
    assert any(isinstance(p.placements[0], _StridedShard) for p in models[strategy].parameters())
    for step in range(3):
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        own = {alone: rows, strategy: data.of(rows)}
        for which, one in prepared.items():
            which.backward(one.model(own[which]).square().sum(), one)
        norms = [which.optimizer_step(one, 0.5) for which, one in prepared.items()]
        assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    manager = CheckpointManager(strategy, folder, asynchronous=False)
    assert manager.save(3, {"actor": prepared[strategy]}, {}, {}, {})
    same(strategy, models[strategy], alone, models[alone])
    if strategy.is_main:
        fresh = prepared_of(alone, mlp())
        CheckpointManager(alone, folder).load(folder / "step_000003", {"actor": fresh})
        assert all(
            torch.allclose(a, b, atol=1e-5) for a, b in zip(fresh.model.parameters(), models[alone].parameters()))
    strategy.axes = Axes()
    strategy.barrier()


def some_of_the_ranks(outer: FSDPV2Strategy, folder: Path) -> None:
    """Ranks 1 and 3 train and save while the other two do nothing; the steps are those of one process."""
    if outer.rank % 2:
        strategy, alone = FSDPV2Strategy(StrategyConfig(strategy="fsdp"), ranks=[3, 1]), SingleProcessStrategy()
        strategy.setup()
        data = strategy.mesh.data
        assert (data.index, data.size, strategy.is_main) == (outer.rank // 2, 2, outer.rank == 1)
        assert strategy.all_gather_object(outer.rank) == [1, 3] and int(strategy.all_reduce(torch.tensor(1))) == 2
        assert strategy.exchange([(outer.rank, 0), (outer.rank, 1)]) == [(1, data.index), (3, data.index)]
        for size in (0, 1):  # divided, and replicated
            models = {alone: mlp(), strategy: mlp()}
            prepared = {which: which.prepare(model, SPEC, shard_size=size) for which, model in models.items()}
            for step in range(2):
                rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
                alone.backward(models[alone](rows).square().sum(), prepared[alone])
                strategy.backward(models[strategy](data.of(rows)).square().sum(), prepared[strategy])
                norms = [which.optimizer_step(one, 0.5) for which, one in prepared.items()]
                assert norms[1] == pytest.approx(norms[0], rel=1e-5)
            same(strategy, models[strategy], alone, models[alone])
            manager = CheckpointManager(strategy, folder / str(size), asynchronous=False)
            assert manager.save(2, {"actor": prepared[strategy]}, {}, {}, {}) and manager.latest() is not None
        groups_of_some(strategy, outer.rank)
        strategy.barrier()
    else:
        with pytest.raises(ValueError, match=rf"rank {outer.rank} does not run this strategy, .* ranks \[1, 3\]"):
            FSDPV2Strategy(StrategyConfig(strategy="fsdp"), ranks=[3, 1]).setup()
    outer.barrier()


def groups_of_some(strategy: FSDPV2Strategy, rank: int) -> None:
    """Ranks that share an engine are those of the strategy; with different numbers of groups they say so at once."""
    assert dist.get_process_group_ranks(strategy.mesh.neighbours(2, 7)) == [1, 3]
    assert strategy.mesh.neighbours(1, 7) is None
    with pytest.raises(ValueError, match="engine_tp_size 3 does not divide the 2 ranks that generate"):
        strategy.mesh.neighbours(3, 7)
    more = [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank == 1)]
    with pytest.raises(RuntimeError, match=r"ranks \[1, 3\] begin .*: rank 1 (\d+), rank 3 (\d+)\. Every") as found:
        strategy.mesh.neighbours(2, 7)
    one, three = map(int, re.findall(r"rank \d (\d+)", str(found.value)))
    assert one == three + 1
    more += [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank == 3)]
    assert more and dist.get_process_group_ranks(strategy.mesh.neighbours(2, 7)) == [1, 3]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 4, bias=False))


def same(strategy: Any, model: nn.Module, alone: Any, other: nn.Module) -> None:
    """The weights of both are the same, gathered and as the sum of what each rank is responsible for."""
    parts = {name: strategy.all_reduce(placed(part)) for name, part in strategy.own_slices(model)}
    right = dict(alone.gathered(other, 1 << 20))
    for name, found in strategy.gathered(model, 1 << 20):
        assert torch.allclose(found, right[name], atol=1e-5) and torch.equal(found, parts[name]), name


def main(folder: Path) -> None:
    strategy = FSDPV2Strategy(StrategyConfig(strategy="fsdp"))
    strategy.setup()
    names, wholes, tensors = map(list, zip(*cases()))
    slices_gathers_and_files(strategy, names, wholes, tensors)
    norms_and_updates(strategy, wholes[::3], tensors[::3])
    eight_bits(tensors)
    tensor_parallel(strategy, folder / "parallel")
    some_of_the_ranks(strategy, folder)
    data_ranks(strategy)
    print(f"{len(names)} layouts")
    strategy.teardown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
