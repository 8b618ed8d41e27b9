"""DeepSpeed ZeRO: optimizer state (stage 1), gradients (2) and weights (3) are sharded over ranks."""
import logging
import os
import sys
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightrft.config.schema import StrategyConfig
from lightrft.strategy import collectives
from lightrft.strategy.base import Prepared, named_in, trained, untied_state
from lightrft.strategy.deepspeed import LIVE_AT_ONCE, Sizes, partitions
from lightrft.strategy.deepspeed.partitions import Partitions, ReadParams, Stage1Or2, Stage3, ZeroOptimizer, span
from lightrft.strategy.distributed import DistributedStrategy, transformer_blocks
from lightrft.strategy.materialize import materialize, read_elements
from lightrft.strategy.mixed_precision import ComputeCopy, round_frozen, round_in_passes
from lightrft.strategy.optimizer import LocalOptimizer, OptimSpec, create_scheduler, load, set_schedule_step
from lightrft.strategy.sharding import flat_slice, ParamSlice
from lightrft.utils.env import World
from lightrft.utils.tensors import replace_tensors

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
BUFFERS = ("lp_grads", "contiguous_grad_buffer")  # DeepSpeed's names of buffers that only an update needs


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Let imports of a package fail within, unless it is imported already."""
    hides = name not in sys.modules
    if hides:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hides:
            del sys.modules[name]


def import_deepspeed() -> Any:
    """Import the package, set up to use the CPU where there is no CUDA.

    Its warnings report the choices made here, so only its errors are shown. Where MLflow is installed, DeepSpeed's
    tuner, which nothing here uses, would import it: that takes longer than all of DeepSpeed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    # without it, DeepSpeed on CPUs counts devices with a program that it starts for every gradient
    os.environ.setdefault("LOCAL_SIZE", str(World.from_env().local_world_size))
    with warnings.catch_warnings(), _hidden("mlflow"):
        warnings.simplefilter("ignore")
        import deepspeed
    warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor)", FutureWarning)  # its calls
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at the first use, and it spins
    return deepspeed


def divide(model: nn.Module, config: dict[str, Any]) -> None:
    """Divide the parameters of ``model`` among all ranks as stage 3 does, one after the other.

    One on the meta device gets memory, which DeepSpeed cuts; then this rank reads the elements that it keeps. Others
    are the same on all ranks.
    """
    package = import_deepspeed()
    package.init_distributed(dist_init_required=False)
    group = package.utils.groups._get_zero_param_intra_parallel_group()  # of earlier models with --zpg
    init = package.zero.Init(config_dict_or_path=config, dtype=torch.float32, zero_param_parallel_group=group)

    def read(name: str, tensor: Tensor) -> nn.Parameter:
        param: Any = nn.Parameter(torch.empty_like(tensor, device=init.local_device))
        init._convert_to_deepspeed_param(param)
        param.partition()
        param.ds_secondary_tensor = None  # a copy of memory not yet filled; DeepSpeed makes it again in the first pass
        start, count = span(param, init.rank)
        if count:
            param.ds_tensor[:count].copy_(read_elements(model, name, tensor.shape, start, count))
        return param

    with torch.no_grad():
        replace_tensors(model, lambda tensor: tensor.is_meta and isinstance(tensor, nn.Parameter), read)
        init._convert_to_zero_parameters(model.parameters())


def live_at_once(model: nn.Module) -> int:
    """Return the elements up to which stage 3 gathers weights ahead of their use, and keeps those used again soon.

    Where activations are recomputed, one layer: DeepSpeed then holds less than the two that
    :func:`lightrft.strategy.memory.gathered_weights` counts, and still gathers a layer once for its recomputed and its
    backward pass.
    """
    if not any(vars(module).get("gradient_checkpointing") for module in model.modules()):
        return LIVE_AT_ONCE
    return max((sum(param.numel() for param in layer.parameters()) for layer in transformer_blocks(model)), default=0)


def settings(cfg: StrategyConfig, sizes: Sizes, model: nn.Module, trained: bool) -> dict[str, Any]:
    """DeepSpeed's configuration for ``model``, which is not yet divided.

    Everything is float32, bfloat16 is left to :mod:`lightrft.strategy.mixed_precision`: DeepSpeed's own bf16 mode
    rounds the weights before it copies them, and its autocast mode sums gradients in bfloat16. Batches, clipping and
    the schedule are the strategy's.
    """
    zero: dict[str, Any] = {
        "stage": cfg.zero_stage,
        "overlap_comm": cfg.overlap_comm,
        "reduce_bucket_size": max(1, min(sizes.reduce, sum(param.numel() for param in model.parameters()))),
        "allgather_bucket_size": sizes.reduce,
    }
    if cfg.zero_stage == 3:
        live = live_at_once(model)
        zero |= {"zero_hpz_partition_size": cfg.zpg, "stage3_param_persistence_threshold": sizes.persist,
                 "stage3_prefetch_bucket_size": sizes.reduce, "memory_efficient_linear": False,
                 "stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}  # yapf: disable
    elif cfg.zero_stage and not cfg.adam_offload:
        zero["compute_grad_norm"] = False
    if cfg.adam_offload and cfg.zero_stage and trained:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "communication_data_type": "fp32",
        "gradient_allreduce_op": "mean" if cfg.zero_stage == 3 else "sum",  # with stage 3 it only averages
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def gather_by_layer(model: nn.Module) -> None:
    """Let stage 3 gather all weights of a layer in one call of it, where ranks call its parts differently often."""
    package = import_deepspeed()
    for module in model.modules():
        if getattr(module, "calls_by_rank", False):
            package.utils.set_z3_leaf_module(module, True)
            module.register_forward_pre_hook(_by_position, with_kwargs=True)


def _by_position(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass the hidden states by position and with a gradient.

    By such a tensor alone DeepSpeed sees the end of the backward pass of a layer. Without one it reduces the gradients
    and frees the weights at its start.
    """
    hidden, *others = args or (kwargs["hidden_states"], )
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    return (hidden, *others), {name: value for name, value in kwargs.items() if name != "hidden_states"}


class DeepspeedStrategy(DistributedStrategy):
    """ZeRO of ``cfg.zero_stage`` over all ranks; with 0 every rank holds everything.

    All ranks must run the same number of forward and backward passes. From stage 2 on gradients are summed over ranks
    after every micro-batch, before that after the last one of a step.
    """
    name = "deepspeed"

    def __init__(self, cfg: StrategyConfig | None = None, bf16: bool = False, sizes: Sizes | None = None) -> None:
        super().__init__(cfg, bf16)
        self.sizes = sizes or Sizes()
        self.engines: dict[nn.Module, Any] = {}
        self.reads: dict[nn.Module, ReadParams] = {}
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
        super().teardown()
        self.engines.clear()
        self.reads.clear()
        self._meshes.clear()

    def _destroy_groups(self) -> None:
        """Override :meth:`DistributedStrategy._destroy_groups`: DeepSpeed forgets its groups too. It would use them
        again in the next run of this process."""
        comm = import_deepspeed().comm
        destroy = comm.destroy_process_group if comm.is_initialized() else super()._destroy_groups
        destroy()

    def _prepare(self, model: nn.Module, optim: OptimSpec | None, shard_size: int) -> Prepared:
        """Pass ``model`` to DeepSpeed. A model that is not trained is divided with stage 3 only; ``shard_size`` has no
        meaning."""
        divided = self._divides_weights()
        if optim is None:
            model.requires_grad_(False)
        if self.bf16 and (optim is None or not divided):  # stage 3 joins weights of one type only
            round_frozen(model)
        config = settings(self.cfg, self.sizes, model, optim is not None)
        if divided:
            gather_by_layer(model)
            divide(model, config)
        materialize(model, self.device)
        model.to(self.device)
        if optim is None:
            return Prepared(self._engine(model, None, config).module if divided else model)
        kind = ZeroOptimizer if self.cfg.zero_stage else LocalOptimizer
        offloaded = self.cfg.adam_offload and not self.cfg.zero_stage  # from stage 1 on DeepSpeed does it
        optimizer = kind(model.named_parameters(), optim, offloaded)
        scheduler, self.reads[model] = create_scheduler(optimizer, optim), ReadParams(optimizer.owners)
        engine = self._engine(model, optimizer, config)
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.partitions = self._partitions(engine.optimizer, optimizer)
        if self.bf16 and divided:
            round_in_passes(model)
        return Prepared(model, optimizer, scheduler, ComputeCopy(model) if self.bf16 and not divided else None)

    def _engine(self, model: nn.Module, optimizer: LocalOptimizer | None, config: dict[str, Any]) -> Any:
        """Create DeepSpeed's engine around ``model``, on the existing process group."""
        initialize = import_deepspeed().initialize
        self.engines[model] = initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
        return self.engines[model]

    def _partitions(self, zero: Any, optimizer: ZeroOptimizer) -> Partitions:
        names = {param: name for name, param in optimizer.owners.items()}
        kind = Stage3 if self.cfg.zero_stage == 3 else Stage1Or2
        return kind(zero, names, self.rank, self.cfg.adam_offload)

    def _mesh(self, device_type: str) -> DeviceMesh:
        """Mesh of all ranks in one dimension."""
        if device_type not in self._meshes:
            self._meshes[device_type] = replace(self.mesh, device_type=device_type).dense()
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
        optimizer, unread = trained(prepared), self._unread(prepared)
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.unread = unread
        else:
            for name in unread:
                optimizer.owners[name].grad = None
        self.engines[prepared.model].step()

    def _unread(self, prepared: Prepared) -> list[str]:
        """Names of the trained parameters that no backward pass of this step reached on any rank; a collective."""
        names, read = list(trained(prepared).owners), self.reads[prepared.model].names
        reached = self.all_reduce(torch.tensor([name in read for name in names]), "max").tolist()
        return [name for name, found in zip(names, reached) if not found]

    def discard_gradients(self, prepared: Prepared) -> None:
        """Extend :meth:`StrategyBase.discard_gradients`: what was read is forgotten too."""
        super().discard_gradients(prepared)
        self.reads[prepared.model].names.clear()

    def _by_replicas(self, params: dict[str, Tensor]) -> dict[int, list[str]]:
        return {1 if self.cfg.zero_stage else self.world_size: [*params]}

    # -- weights ------------------------------------------------------------------------------------------------------
    def _divides_weights(self) -> bool:
        return self.cfg.zero_stage == 3

    def free_full(self, model: nn.Module) -> None:
        """Free the whole weights that stage 3 has gathered."""
        if self._divides_weights():
            self.engines[model].empty_partition_cache()

    def gathered(self, model: nn.Module, bucket_bytes: int,
                 names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Implement :meth:`StrategyBase.gathered`; with stage 3 the pieces of a bucket come in one all-gather."""
        params: dict[str, Any] = dict(named_in(model, names))
        if not self._divides_weights():
            yield from ((name, param.detach()) for name, param in params.items())
            return
        mesh = self._mesh(self.device.type)
        pieces = ((name, DTensor.from_local(param.ds_tensor.detach(), mesh, [Shard(0)], run_check=False))
                  for name, param in params.items())  # yapf: disable
        for bucket in collectives.buckets(pieces, bucket_bytes):
            for name, flat in collectives.gather_bucket(bucket, self.device):
                yield name, flat[:params[name].ds_numel].view(params[name].ds_shape)

    def own_slice(self, param: Any) -> ParamSlice:
        """Override :meth:`StrategyBase.own_slice`; each rank is responsible for an equal share of undivided weights."""
        if self._divides_weights():
            start, count = span(param, self.rank)
            return flat_slice(param.ds_tensor.detach()[:count], param.ds_shape, start)
        size = -(-param.numel() // self.world_size)
        start = min(self.rank * size, param.numel())
        return flat_slice(param.detach().view(-1)[start:start + size], param.shape, start)

    # -- state --------------------------------------------------------------------------------------------------------
    def state_dict(self, prepared: Prepared) -> dict[str, Any]:
        """Override :meth:`StrategyBase.state_dict`; divided tensors come as copies of rows in host memory. A
        collective."""
        optimizer = prepared.optimizer
        if not self.cfg.zero_stage:
            return super().state_dict(prepared)
        state = {f"model/{name}": value for name, value in self._weights(prepared.model)}
        if isinstance(optimizer, ZeroOptimizer):
            moments = partitions.save_moments(optimizer, self._mesh("cpu"), self.device)
            state |= {f"optim/{key}": value for key, value in moments.items()}
            state["schedule/step"] = torch.tensor(prepared.scheduler.last_epoch)
        return state

    def _weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        rows: dict[str, Tensor] = {}
        if self._divides_weights():
            stream = self.gathered(model, partitions.BUCKET_BYTES)
            rows = {name: partitions.own_rows(whole, self._mesh("cpu")) for name, whole in stream}
        return ((name, rows.get(name, value.detach())) for name, value in untied_state(model))

    @torch.no_grad()
    def load_state_dict(self, prepared: Prepared, state: dict[str, Any]) -> None:
        """Override :meth:`StrategyBase.load_state_dict`; a collective."""
        if not self.cfg.zero_stage:
            return super().load_state_dict(prepared, state)
        self._load_weights(prepared, {key[6:]: value for key, value in state.items() if key.startswith("model/")})
        if isinstance(prepared.optimizer, ZeroOptimizer):
            moments = {key[6:]: value for key, value in state.items() if key.startswith("optim/")}
            partitions.load_moments(prepared.optimizer, moments, self.device)
            set_schedule_step(prepared.scheduler, int(state["schedule/step"]))
        prepared.refresh()

    def _load_weights(self, prepared: Prepared, state: dict[str, Tensor]) -> None:
        self.free_full(prepared.model)
        own: dict[str, Any] = dict(untied_state(prepared.model))
        for name, value in state.items():
            if not isinstance(value, DTensor):
                own[name].copy_(value)
        divided = ((name, value) for name, value in state.items() if isinstance(value, DTensor))
        for name, whole in partitions.from_rows(divided, self.device):
            start, count = span(own[name], self.rank)
            own[name].ds_tensor[:count].copy_(whole[start:start + count])
        if isinstance(prepared.optimizer, ZeroOptimizer):
            prepared.optimizer.partitions.refresh()

    def _move(self, prepared: Prepared, device: torch.device) -> None:
        """Move the weights; gradients, buffers for them and the second copies of ``--zpg`` are not kept."""
        self.free_full(prepared.model)
        params: list[Any] = list(prepared.model.parameters())
        held = [param.ds_tensor if self._divides_weights() else param for param in params]
        for param in params if self._divides_weights() else ():
            param.ds_secondary_tensor = None  # DeepSpeed makes it again in the next pass
        if held[0].device == device:
            return
        if not self.cfg.zero_stage:
            super()._move(prepared, device)
            return

        def to(tensor: Tensor) -> Tensor:
            if device.type != "cpu":
                return load(tensor.detach(), device)
            return self.host.store(tensor, tensor.detach(), frozen=prepared.optimizer is None)

        if isinstance(prepared.optimizer, ZeroOptimizer):
            prepared.optimizer.partitions.move(to)
            engine = self.engines[prepared.model]
            engine.offload_states(include=BUFFERS) if device.type == "cpu" else engine.reload_states()
        for tensor in held:
            if tensor.device != device:  # what is not trained
                tensor.data = to(tensor)
        if device.type == "cuda":  # DeepSpeed gathers on the default stream, whichever one these copies are queued on
            torch.cuda.current_stream().synchronize()
