"""DeepSpeed ZeRO: ranks divide optimizer state (stage 1), gradients (2) and weights (3) among them."""
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.local import autocast, untied_state
from lightrft.strategy.deepspeed import backend, state as checkpoint
from lightrft.strategy.deepspeed.partitions import Partitions, Stage1Or2, Stage3, ZeroAdamW, span
from lightrft.strategy.deepspeed.sizes import Sizes
from lightrft.strategy.distributed import DistributedStrategy
from lightrft.strategy import collectives
from lightrft.strategy.mesh import shard_mesh
from lightrft.strategy.optimizer import create_scheduler, LocalAdamW, set_schedule_step, to_host
from lightrft.strategy.base import OptimSpec, Part, Prepared

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
BUFFERS = ("lp_grads", "contiguous_grad_buffer")  # DeepSpeed's names of buffers that only an update needs


class DeepspeedStrategy(DistributedStrategy):
    """ZeRO of ``cfg.zero_stage`` over all ranks; with 0 every rank holds everything.

    All ranks must run the same number of forward and backward passes. From stage 2 on gradients are summed over ranks
    after every micro-batch, before that after the last one of a step.
    """

    def __init__(self, cfg: StrategyConfig, bf16: bool = False, sizes: Sizes | None = None) -> None:
        super().__init__(cfg, bf16)
        self.sizes = sizes or Sizes()
        self.engines: dict[nn.Module, Any] = {}
        self._meshes: dict[str, DeviceMesh] = {}
        self._alone = False

    # -- life ---------------------------------------------------------------------------------------------------------
    def setup(self) -> None:
        """Join the group. Without torchrun, set the variables that torchrun would set for a single process."""
        super().setup()
        self._alone = "LOCAL_RANK" not in os.environ
        if self._alone:
            os.environ.update(ALONE)

    def teardown(self) -> None:
        """Release the models, then leave the group."""
        for name in ALONE if self._alone else ():
            os.environ.pop(name, None)
        for engine in self.engines.values():
            engine.destroy()
        self.engines.clear()
        self._meshes.clear()
        super().teardown()

    def prepare(self, model: nn.Module, optim: OptimSpec | None = None, shard_size: int = 0) -> Prepared:
        """Pass ``model`` to DeepSpeed. A model that is not trained is divided with stage 3 only; ``shard_size`` has no
        meaning."""
        if self.bf16:
            autocast(model, self.device.type)
        if optim is None:
            model.requires_grad_(False)
            return Prepared(model.to(self.device) if self.cfg.zero_stage < 3 else self._engine(model, None).module)
        kind = ZeroAdamW if self.cfg.zero_stage else LocalAdamW
        optimizer = kind(model.named_parameters(), optim, fused=True)
        scheduler = create_scheduler(optimizer, optim)
        engine = self._engine(model, optimizer)
        if isinstance(optimizer, ZeroAdamW):
            optimizer.partitions = self._partitions(engine.optimizer, optimizer)
        return Prepared(model, optimizer, scheduler)

    def _engine(self, model: nn.Module, optimizer: LocalAdamW | None) -> Any:
        numel = sum(param.numel() for param in model.parameters())
        config = backend.settings(self.cfg, self.sizes, numel, optimizer is not None)
        self.engines[model] = backend.make_engine(model, optimizer, config)
        return self.engines[model]

    def _partitions(self, zero: Any, optimizer: ZeroAdamW) -> Partitions:
        names = {param: name for name, param in optimizer.owners.items()}
        kind = Stage3 if self.cfg.zero_stage == 3 else Stage1Or2
        return kind(zero, names, self.rank, self.cfg.adam_offload)

    def _mesh(self, device_type: str) -> DeviceMesh:
        """Mesh of all ranks in one dimension."""
        if device_type not in self._meshes:
            self._meshes[device_type] = shard_mesh(device_type, self.world_size)
        return self._meshes[device_type]

    # -- gradients ----------------------------------------------------------------------------------------------------
    def _backward(self, loss: Tensor, model: nn.Module, last: bool) -> None:
        """Run DeepSpeed's pass; stage 3 averages over ranks, so the loss is scaled up (exact for powers of two)."""
        engine = self.engines[model]
        engine.set_gradient_accumulation_boundary(last)
        if self.cfg.zero_stage:
            engine.optimizer.clear_backward_seen_flag()  # as its own forward pass would
        engine.backward(loss * self.world_size if self.cfg.zero_stage == 3 else loss, scale_wrt_gas=False)

    def _update(self, prepared: Prepared) -> None:
        self.engines[prepared.model].step()

    def _replicas(self, model: nn.Module) -> int:
        return 1 if self.cfg.zero_stage else self.world_size

    # -- weights ------------------------------------------------------------------------------------------------------
    def _divides_weights(self) -> bool:
        return self.cfg.zero_stage == 3

    def free_full(self, model: nn.Module) -> None:
        """Implement :meth:`StrategyBase.free_full`."""
        if self._divides_weights():
            self.engines[model].empty_partition_cache()

    def gathered(self, model: nn.Module, bucket_bytes: int, of: str = "") -> Iterator[tuple[str, Tensor]]:
        """Implement :meth:`CommonStrategy.gathered`; with stage 3 the pieces of a bucket come in one all-gather."""
        params: dict[str, Any] = {name: param for name, param in model.named_parameters() if of in name}
        if not self._divides_weights():
            yield from ((name, param.detach()) for name, param in params.items())
            return
        mesh = self._mesh(self.device.type)
        pieces = ((name, DTensor.from_local(param.ds_tensor.detach(), mesh, [Shard(0)], run_check=False))
                  for name, param in params.items())  # yapf: disable
        for bucket in collectives.buckets(pieces, bucket_bytes):
            for name, flat in collectives.gather_bucket(bucket, self.device):
                yield name, flat[:params[name].ds_numel].view(params[name].ds_shape)

    def part(self, param: Any) -> Part:
        """Override :meth:`CommonStrategy.part`; each rank is responsible for an equal share of undivided weights."""
        if self._divides_weights():
            start, count = span(param, self.rank)
            return Part(param.ds_tensor.detach()[:count], param.ds_shape, start)
        size = -(-param.numel() // self.world_size)
        start = min(self.rank * size, param.numel())
        return Part(param.detach().view(-1)[start:start + size], param.shape, start)

    # -- state --------------------------------------------------------------------------------------------------------
    def state_dict(self, prepared: Prepared) -> dict[str, Any]:
        """Override :meth:`CommonStrategy.state_dict`; divided tensors come as copies of rows in host memory. A
        collective."""
        optimizer = prepared.optimizer
        if not self.cfg.zero_stage:
            return super().state_dict(prepared)
        state = {f"model/{name}": value for name, value in self._weights(prepared.model)}
        if isinstance(optimizer, ZeroAdamW):
            moments = checkpoint.save_moments(optimizer, self._mesh("cpu"), self.device)
            state |= {f"optim/{key}": value for key, value in moments.items()}
            state["schedule/step"] = torch.tensor(prepared.scheduler.last_epoch)
        return state

    def _weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        rows: dict[str, Tensor] = {}
        if self._divides_weights():
            stream = self.gathered(model, checkpoint.BUCKET_BYTES)
            rows = {name: checkpoint.own_rows(whole, self._mesh("cpu")) for name, whole in stream}
        return ((name, rows.get(name, value.detach())) for name, value in untied_state(model))

    @torch.no_grad()
    def load_state_dict(self, prepared: Prepared, state: dict[str, Any]) -> None:
        """Override :meth:`CommonStrategy.load_state_dict`; a collective."""
        if not self.cfg.zero_stage:
            return super().load_state_dict(prepared, state)
        self._load_weights(prepared, {key[6:]: value for key, value in state.items() if key.startswith("model/")})
        if isinstance(prepared.optimizer, ZeroAdamW):
            moments = {key[6:]: value for key, value in state.items() if key.startswith("optim/")}
            checkpoint.load_moments(prepared.optimizer, moments, self.device)
            set_schedule_step(prepared.scheduler, int(state["schedule/step"]))

    def _load_weights(self, prepared: Prepared, state: dict[str, Tensor]) -> None:
        self.free_full(prepared.model)
        own: dict[str, Any] = dict(untied_state(prepared.model))
        for name, value in state.items():
            if not isinstance(value, DTensor):
                own[name].copy_(value)
        divided = ((name, value) for name, value in state.items() if isinstance(value, DTensor))
        for name, whole in checkpoint.from_rows(divided, self.device):
            start, count = span(own[name], self.rank)
            own[name].ds_tensor[:count].copy_(whole[start:start + count])
        if isinstance(prepared.optimizer, ZeroAdamW):
            prepared.optimizer.partitions.refresh()

    def _move(self, prepared: Prepared, device: torch.device) -> None:
        """Move the weights; gradients and buffers for them are not kept."""
        params: Iterator[Any] = prepared.model.parameters()
        held = [param.ds_tensor if self._divides_weights() else param for param in params]
        if held[0].device == device:
            return
        if not self.cfg.zero_stage:
            super()._move(prepared, device)
            return
        place = to_host if device.type == "cpu" else functools.partial(Tensor.to, device=device)
        self.free_full(prepared.model)
        if isinstance(prepared.optimizer, ZeroAdamW):
            prepared.optimizer.partitions.move(place)
            engine = self.engines[prepared.model]
            engine.offload_states(include=BUFFERS) if device.type == "cpu" else engine.reload_states()
        for tensor in held:
            if tensor.device != device:  # what is not trained
                tensor.data = place(tensor.data)
