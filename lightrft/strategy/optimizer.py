"""Optimizer on the local shards of a rank: schedule, gradient norm, state under names of parameters, offload."""
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from lightrft.config.shared_schema import OptimConfig
from lightrft.config.tree import extended
from lightrft.strategy.eight_bit import block_size, decode_moment, encode_moment
from lightrft.strategy.host_buffers import HostBuffers
from lightrft.strategy.memory import STEP_BYTES
from lightrft.strategy.optimizer_contract import check_contract
from lightrft.strategy.optimizers import OPTIMIZERS
from lightrft.strategy.sharding import cuts_rows, full_shape, like, local
from lightrft.utils.errors import UserError
from lightrft.utils.tensors import runs


@dataclass(frozen=True)
class OptimSpec:
    """Optimizer and its schedule, which maps the optimizer step (0, 1, ...) to a factor on ``lr``. The ``options`` name
    the optimizer and hold what it reads; its default is AdamW."""
    lr: float
    options: OptimConfig = field(default_factory=lambda: extended(OptimConfig)())
    schedule: Callable[[int], float] = lambda step: 1.0


def load(tensor: Tensor, device: torch.device) -> Tensor:
    """Queue a copy of ``tensor`` to ``device``; what is there already is returned as it is. A copy to host memory is
    waited for, because the host may read it at once."""
    return tensor.to(device, non_blocking=device.type != "cpu")


class LocalOptimizer(torch.optim.Optimizer):
    """The optimizer of ``spec`` over the trainable parameters, on plain tensors only: of a DTensor parameter, this
    rank's shard.

    An element-wise update of the shards equals that of the full tensors, and it does not pay DTensor dispatch for each
    operation of each parameter. Parameters of fewer than two dimensions (norms, biases) are not decayed. ``owners``
    maps names to the model's parameters, ``shards`` to what is updated; ``rule`` is the registered optimizer, which
    updates the groups and the state of this one.

    With ``offloaded``, moments rest in host memory. A step updates about :data:`STEP_BYTES` of weights at a time, whose
    moments alone visit the device; the result is the same. Moments that the optimizer has in 8 bits rest as codes and
    scales (``<moment>_scale``), and those of one part at a time are float32.
    """

    def __init__(self, named_params: Iterable[tuple[str, nn.Parameter]], spec: OptimSpec,
                 offloaded: bool = False) -> None:
        self.owners = {name: param for name, param in named_params if param.requires_grad}
        if not self.owners:
            raise UserError("the model has no trainable parameter; check --freeze_prefix and --target_modules")
        self.shards = {name: self._shard(param) for name, param in self.owners.items()}
        self.backwards = 0  # micro-batches since the last step
        self.name, entry = spec.options.optim, OPTIMIZERS.get(spec.options.optim)
        self.moment_names, self.coded = entry.moments(spec.options), entry.coded
        if self.coded and (cut := [name for name, param in self.owners.items() if cuts_rows(param)]):
            raise UserError(
                f"--optim {self.name}: ranks hold parts of the rows of {cut[0]}, and a block of 8-bit moments "
                "needs a whole row; use --optim adamw")
        self.offloaded, self.host = offloaded, HostBuffers()
        check_contract(entry, spec.options)
        self.rule = entry.build(self._groups(spec), spec.options)
        self.rule.state.clear()  # which strategies make
        super().__init__(self.rule.param_groups, self.rule.defaults)

    @staticmethod
    def _shard(param: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(local(param)) if isinstance(param, DTensor) else param

    def _groups(self, spec: OptimSpec) -> list[dict[str, Any]]:
        """The shards that are decayed, and the others; a group that would be empty is left out."""
        decayed = [self.shards[name] for name, param in self.owners.items() if len(full_shape(param)) >= 2]
        others = [self.shards[name] for name, param in self.owners.items() if len(full_shape(param)) < 2]
        groups = [(decayed, spec.options.l2), (others, 0.0)]
        return [{"params": shards, "lr": spec.lr, "weight_decay": decay} for shards, decay in groups if shards]

    def bind(self) -> None:
        """Point the shards and their gradients at the storage their owners have now."""
        for name, owner in self.owners.items():
            shard = self.shards[name]
            if shard is not owner:
                shard.data = local(owner)
                shard.grad = None if owner.grad is None else local(owner.grad)

    def step(self, closure: Any = None) -> Any:
        """Update the shards that have a gradient; with ``offloaded`` or moments in 8 bits, in parts."""
        if not (self.offloaded or self.coded):
            self._start(shard for group in self.param_groups for shard in group["params"])
            self._update(self.param_groups)
            return
        for group in self.param_groups:
            for part in runs(group["params"], lambda shard: shard.nbytes, STEP_BYTES):
                self._start(part)
                self.load_moments(part)
                self._decode(part)
                self._update([group | {"params": part}])
                self._encode(part)
                if self.offloaded:
                    self.store_moments(part)
        self.host.wait()

    def _start(self, shards: Iterable[Tensor]) -> None:
        """Begin the state of those ``shards`` that have a gradient and none yet."""
        for shard in shards:
            if shard.grad is not None and not self.state[shard]:
                self.state[shard] = self._zeros(shard, shard.device)

    def _zeros(self, shard: Tensor, device: torch.device) -> dict[str, Tensor]:
        """State before the first step, the moments on ``device``."""
        counter = shard.device if self.defaults.get("fused") else torch.device("cpu")  # others read it on the host
        moments = {key: torch.zeros_like(shard, device=device) for key in self.moment_names}
        return {"step": torch.zeros((), dtype=torch.float32, device=counter), **moments}

    def _update(self, groups: list[dict[str, Any]]) -> None:
        """Run the registered optimizer on ``groups``; DeepSpeed replaces those of this object, and their parameters."""
        self.rule.param_groups, self.rule.state = groups, self.state
        self.rule.step()

    def load_moments(self, shards: Iterable[Tensor]) -> None:
        """Move the moments of ``shards`` to where these are."""
        for shard in shards:
            state = self.state[shard]
            state.update({key: load(value, shard.device) for key, value in state.items() if key != "step"})

    def store_moments(self, shards: Iterable[Tensor]) -> None:
        """Queue copies of the moments of ``shards`` to host memory; :meth:`HostBuffers.wait` ends them."""
        for shard in shards:
            state = self.state[shard]
            state.update({key: self.host.store((shard, key), value) for key, value in state.items() if key != "step"})

    def _decode(self, shards: Iterable[Tensor]) -> None:
        """Make the float32 moments of ``shards`` from codes and scales, where there are such."""
        for state in map(self.state.__getitem__, shards):
            for key, signed in self.coded.items():
                if f"{key}_scale" in state:
                    state[key] = decode_moment(state[key], state.pop(f"{key}_scale"), signed)

    def _encode(self, shards: Iterable[Tensor]) -> None:
        """Undo :meth:`_decode`; float32 moments of a shard without whole blocks stay."""
        for shard in shards:
            state, size = self.state[shard], block_size(shard.shape)
            for key, signed in self.coded.items():
                if size and key in state:
                    state[key], state[f"{key}_scale"] = encode_moment(state[key], signed, size)

    def offload(self) -> None:
        """Move all moments to host memory."""
        self.store_moments(list(self.state))
        self.host.wait()

    def reload(self) -> None:
        """Undo :meth:`offload`, unless moments rest in host memory anyway."""
        if not self.offloaded:
            self.load_moments(list(self.state))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of shards and owners."""
        super().zero_grad(set_to_none)
        for owner in self.owners.values():
            owner.grad = None
        self.backwards = 0

    def named_grads(self) -> dict[str, Tensor]:
        """This rank's part of every existing gradient."""
        return {name: shard.grad for name, shard in self.shards.items() if shard.grad is not None}

    def moments(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (parameter name, "step" | name of a moment | "<moment>_scale", tensor); state without a step starts as
        zeros, which means the same as no state."""
        for name, shard in self.shards.items():
            yield from ((name, key, value) for key, value in self.started(shard).items())

    def started(self, shard: Tensor) -> dict[str, Tensor]:
        """State of ``shard``, created as zeros before the first step."""
        if not self.state[shard]:
            self.state[shard] = self._zeros(shard, torch.device("cpu") if self.offloaded else shard.device)
            self._encode([shard])
        return self.state[shard]

    def named_state(self) -> dict[str, Tensor]:
        """The state as ``{"<name>/<key>": tensor}``, sharded like the parameters; writing into it changes the state."""
        return {
            f"{name}/{key}": value if key == "step" else like(value, self.owners[name])
            for name, key, value in self.moments()
        }


def create_scheduler(optimizer: torch.optim.Optimizer, spec: OptimSpec) -> LambdaLR:
    """``spec.lr * spec.schedule(step)`` for optimizer step 0, 1, ..."""
    return LambdaLR(optimizer, spec.schedule)


def set_schedule_step(scheduler: LambdaLR, step: int) -> None:
    """Set the schedule to its state after ``step`` optimizer steps; the rates are computed again, so they are exact."""
    scheduler.last_epoch, scheduler._step_count = step, step + 1
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates):
        group["lr"] = rate
    scheduler._last_lr = rates


def squared_norm(grads: list[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of ``grads``, a float64 scalar on ``device``; 0 for none."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(grads)).double().square().sum().to(device)


def clip(grads: list[Tensor], norm: float, max_norm: float) -> None:
    """Scale ``grads`` in place so that a global norm of ``norm`` becomes at most ``max_norm``; 0 is off."""
    if grads and 0 < max_norm < norm:
        torch._foreach_mul_(grads, max_norm / (norm + 1e-6))
