"""AdamW on the local shards of a rank: schedule, gradient norm, state under parameter names, offload to the host."""
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from lightrft.strategy.host_buffers import HostBuffers
from lightrft.strategy.memory import BLOCKS, STEP_BYTES
from lightrft.strategy.sharding import full_shape, like, local
from lightrft.utils.errors import UserError
from lightrft.utils.tensors import runs

MOMENTS = ("exp_avg", "exp_avg_sq")
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


@dataclass(frozen=True)
class OptimSpec:
    """AdamW and its schedule. ``schedule`` maps the optimizer step (0, 1, ...) to a factor on ``lr``; with
    ``eight_bit`` moments rest in 8 bits."""
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    schedule: Callable[[int], float] = lambda step: 1.0
    eight_bit: bool = False


def load(tensor: Tensor, device: torch.device) -> Tensor:
    """Queue a copy of ``tensor`` to ``device``; what is there already is returned as it is. A copy to host memory is
    waited for, because the host may read it at once."""
    return tensor.to(device, non_blocking=device.type != "cpu")


class LocalAdamW(torch.optim.AdamW):
    """AdamW over the trainable parameters that sees plain tensors only: of a DTensor parameter, this rank's shard.

    AdamW is element-wise, so the update equals that on the full tensors, and it does not pay DTensor dispatch for each
    operation of each parameter. The fused kernel does the whole update in one pass, on CUDA and on CPU. Parameters of
    fewer than two dimensions (norms, biases) are not decayed. ``owners`` maps names to the model's parameters,
    ``shards`` to what is updated.

    With ``offloaded``, moments rest in host memory. A step updates about :data:`STEP_BYTES` of weights at a time, whose
    moments alone visit the device; the result is the same. With ``spec.eight_bit``, moments rest as codes and scales
    (``<moment>_scale``), and those of one part at a time are float32.
    """

    def __init__(self, named_params: Iterable[tuple[str, nn.Parameter]], spec: OptimSpec,
                 offloaded: bool = False) -> None:
        self.owners = {name: param for name, param in named_params if param.requires_grad}
        if not self.owners:
            raise UserError("the model has no trainable parameter; check --freeze_prefix and --target_modules")
        self.shards = {name: self._shard(param) for name, param in self.owners.items()}
        self.backwards = 0  # micro-batches since the last step
        self.offloaded, self.eight_bit, self.host = offloaded, spec.eight_bit, HostBuffers()
        decayed = [self.shards[name] for name, param in self.owners.items() if len(full_shape(param)) >= 2]
        others = [self.shards[name] for name, param in self.owners.items() if len(full_shape(param)) < 2]
        fused = not next(iter(self.owners.values())).is_meta  # in a plan they have no values
        groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": others, "weight_decay": 0.0}]
        super().__init__([group for group in groups if group["params"]], lr=spec.lr, betas=spec.betas, fused=fused)

    @staticmethod
    def _shard(param: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(local(param)) if isinstance(param, DTensor) else param

    def bind(self) -> None:
        """Point the shards and their gradients at the storage their owners have now."""
        for name, owner in self.owners.items():
            shard = self.shards[name]
            if shard is not owner:
                shard.data = local(owner)
                shard.grad = None if owner.grad is None else local(owner.grad)

    def step(self, closure: Any = None) -> Any:
        """Update the shards that have a gradient; with ``offloaded`` or ``eight_bit``, in parts."""
        if not (self.offloaded or self.eight_bit):
            return super().step(closure)
        whole = self.param_groups
        for group in whole:
            for part in runs(group["params"], lambda shard: shard.nbytes, STEP_BYTES):
                self.param_groups = [group | {"params": part}]
                self.load_moments(part)
                self._decode(part)
                super().step()
                self._encode(part)
                if self.offloaded:
                    self.store_moments(part)
        self.param_groups = whole
        self.host.wait()

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
            for key in MOMENTS:
                if f"{key}_scale" in state:
                    state[key] = decode_moment(key, state[key], state.pop(f"{key}_scale"))

    def _encode(self, shards: Iterable[Tensor]) -> None:
        """Undo :meth:`_decode`; float32 moments of a shard without whole blocks stay."""
        for shard in shards:
            state, size = self.state[shard], block_size(shard.shape)
            for key in MOMENTS:
                if self.eight_bit and size and key in state:
                    state[key], state[f"{key}_scale"] = encode_moment(key, state[key], size)

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
        """Yield (parameter name, "step" | "exp_avg" | "exp_avg_sq" | "<moment>_scale", tensor); state without a step
        starts as zeros, which AdamW treats like no state at all."""
        for name, shard in self.shards.items():
            yield from ((name, key, value) for key, value in self.started(shard).items())

    def started(self, shard: Tensor) -> dict[str, Tensor]:
        """State of ``shard``, created as zeros before the first step."""
        state = self.state[shard]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=shard.device)
            state.update({key: torch.zeros_like(shard, device="cpu" if self.offloaded else None) for key in MOMENTS})
            self._encode([shard])
        return state

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


# Moments in eight bits: bitsandbytes' dynamic code, with one float32 scale per block. A block never crosses a row, so
# moments do not depend on the number of ranks that share a parameter by rows, and a checkpoint is exact on all numbers
# of ranks. Blockwise codes: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861, section 2.
def block_size(shape: torch.Size) -> int:
    """Return the elements per block of a parameter of this shape; 0 where its moments stay float32: vectors, and rows
    that are no whole number of blocks."""
    row = shape[1:].numel() if len(shape) >= 2 else 0
    return next((size for size in BLOCKS if row and row % size == 0), 0)


@cache
def _code(key: str, device: torch.device) -> Tensor:
    """The 256 values that a moment can take, as shares of its block's scale, ascending."""
    from bitsandbytes.functional import create_dynamic_map
    return create_dynamic_map(signed=SIGNED[key]).to(device)


def encode_moment(key: str, moment: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Encode the float32 rows of a moment.

    Args:
        key: which moment, of :data:`SIGNED`.
        size: elements per block.

    Returns:
        Codes (uint8, in the shape of ``moment``) and scales (float32 [rows, blocks per row]): each block's largest
        absolute value.
    """
    blocks = moment.shape[1:].numel() // size
    code = _code(key, moment.device)
    if not moment.numel():  # a rank without rows
        return moment.to(torch.uint8), moment.new_empty(0, blocks)
    codes, scales = torch.ops.bitsandbytes.quantize_blockwise(moment.contiguous(), code, size)
    return codes, scales.view(-1, blocks)


def decode_moment(key: str, codes: Tensor, scales: Tensor) -> Tensor:
    """Undo :func:`encode_moment`, up to rounding."""
    if not codes.numel():
        return codes.float()
    size = codes.shape[1:].numel() // scales.shape[1]
    code = _code(key, codes.device)
    return torch.ops.bitsandbytes.dequantize_blockwise(codes, scales.view(-1), code, size, torch.float32)
