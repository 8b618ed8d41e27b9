"""Starting SGLang in this process: its environment, its arguments, its children."""
from typing import Any

import torch
from transformers import PretrainedConfig

from lightrft.config.engine_rules import native_arguments
from lightrft.config.memory import host_cache
from lightrft.config.schema import RolloutConfig
from lightrft.utils.env import World, total_memory

_MIB = 1 << 20
_SPARE = 8  # tokens that SGLang keeps for itself at the end of a context


def _token_bytes(config: PretrainedConfig, bf16: bool, ranks: int) -> int:
    """Of the keys and values of one token, on each of ``ranks``."""
    c = config.get_text_config()
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 2 * c.num_hidden_layers * max(heads // ranks, 1) * dim * (2 if bf16 else 4)


def engine_arguments(cfg: RolloutConfig, config: PretrainedConfig, device: torch.device, bf16: bool,
                     world: World) -> dict[str, Any]:
    """What SGLang is started with for the HF folder that ``config`` is of. Its weights are random until the first
    sync."""
    room = _token_bytes(config, bf16, cfg.engine_tp_size)
    cuda, longest = device.type == "cuda", cfg.prompt_max_len + cfg.generate_max_len + _SPARE
    arguments: dict[str, Any] = {
        "model_path": config.name_or_path,
        "dtype": "bfloat16" if bf16 else "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",  # whose place our own sampler takes
        "context_length": longest,
        "tp_size": cfg.engine_tp_size,
        "device": device.type,
        "base_gpu_id": device.index or 0,
        "enable_memory_saver": cuda and cfg.engine_sleep,
        "mem_fraction_static": cfg.engine_mem_util,
        "max_total_tokens": cfg.engine_kv_mib * _MIB // room or None,
        "quantization": None if cfg.engine_quantization == "none" else cfg.engine_quantization,
        "sleep_on_idle": True,  # a scheduler without work would keep a core busy
        "log_level": "error",
    }
    if not cuda:
        arguments |= {"attention_backend": "torch_native", "disable_overlap_schedule": True, "disable_cuda_graph": True}
        if not cfg.engine_kv_mib:
            cache = host_cache(cfg, total_memory(device) / world.local_world_size)
            arguments["max_total_tokens"] = int(cache) // room
    return arguments | native_arguments(cfg.engine_args)
