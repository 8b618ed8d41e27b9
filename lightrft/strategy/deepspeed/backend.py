"""Import, configuration and engines of DeepSpeed."""
import logging
import os
import warnings
from typing import Any

import torch
from torch import nn

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.deepspeed.sizes import Sizes


def make_engine(model: nn.Module, optimizer: torch.optim.Optimizer | None, config: dict[str, Any]) -> Any:
    """Create a DeepSpeed engine around ``model``, on the existing process group; with the stage of ``config``.

    Without CUDA it is set to use the CPU. Its warnings report the choices made here, so only its errors are shown.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
    warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor)", FutureWarning)  # its calls
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at the first use, and it spins
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def settings(cfg: StrategyConfig, sizes: Sizes, numel: int, trained: bool) -> dict[str, Any]:
    """DeepSpeed's configuration for a model of ``numel`` parameters.

    Everything is float32, bfloat16 is left to autocast: DeepSpeed's own bf16 mode rounds the weights before it copies
    them, and its autocast mode sums gradients in bfloat16. Batches, clipping and the schedule are the strategy's.
    """
    zero: dict[str, Any] = {
        "stage": cfg.zero_stage,
        "overlap_comm": cfg.overlap_comm,
        "reduce_bucket_size": max(1, min(sizes.reduce, numel)),
        "allgather_bucket_size": sizes.reduce,
    }
    if cfg.zero_stage == 3:
        zero |= {"zero_hpz_partition_size": cfg.zpg, "stage3_param_persistence_threshold": sizes.persist,
                 "stage3_prefetch_bucket_size": sizes.reduce, "memory_efficient_linear": False}  # yapf: disable
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
