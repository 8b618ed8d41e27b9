"""Rollout engines, without importing one: their options for every command that generates, and facts about them."""
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightrft.config.options import COUNT, NON_NEGATIVE, option, POSITIVE, PROBABILITY
from lightrft.utils.errors import install_command


@dataclass(frozen=True)
class EngineCaps:
    """Capabilities of an engine, for its options, the checks, the estimates and the doctor. The defaults are those of
    an engine that generates with the trainer's own model.

    Attributes:
        title: its name in messages.
        module: module of its builder; empty: ``lightrft.rollout.NAME.engine``.
        install: command that installs the package of the same name; empty: it comes with lightrft.
        probe: imports of a run, which the doctor tries.
        coldest: it raises lower temperatures to this, or samples greedily, so that log-probs are not those trained.
        example: an entry of ``--engine_args``.
        decided: native arguments that follow from options -> the option to set instead.
        fixed: other native arguments that ranks, weights or sampling depend on; * is any text.
        own_weights: it always holds weights of its own, computes features of media with them, and allocates its cache
            when it starts; else only where the trainer's are divided between the ranks.
        own_process: its work is in a process of its own, with another CUDA context.
        measures_work: what passes and graphs take is measured, and comes from its share of the memory.
        buckets: an update goes through a bucket of ``--sync_bucket_mib`` even if nothing has to be gathered.
        adapters: updates may bring LoRA adapters apart from the base weights.
        rounds_float32: its attention kernels always multiply float32 in TF32, on CUDA.
        first_temperature: it draws the first token of a response at a temperature of its own, if one is set.
        penalizes: it has a repetition penalty.
        min_p_first: it applies min-p before top-p.
        rope: RoPE types depending on the length for which it chooses the trainer's frequencies; None: all.
        counts_media: it is started for a known number of media in a prompt.
        reads_media: it reads decoded media, not only the tensors that the processor makes of them.
        states: its layers with state (linear attention and others) have been compared with the trainer's.
    """
    title: str
    install: str = ""
    probe: str = ""
    coldest: float = 0.0
    example: str = "name=value"
    decided: Mapping[str, str] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    own_weights: bool = False
    own_process: bool = False
    measures_work: bool = False
    buckets: bool = False
    adapters: bool = False
    rounds_float32: bool = False
    first_temperature: bool = False
    penalizes: bool = True
    min_p_first: bool = False
    rope: tuple[str, ...] | None = None
    counts_media: bool = False
    reads_media: bool = False
    states: bool = True
    module: str = ""


# values of --engine_type, to which plugins add; lightrft.rollout.engines has the convention for their folders
ENGINES: dict[str, EngineCaps] = {
    "hf": EngineCaps("the HF engine", first_temperature=True),
    "vllm": EngineCaps(
        "vLLM", f"{install_command('vllm')} (without CUDA: pip install --no-deps -r requirements-vllm.txt)",
        "from vllm.v1.engine.llm_engine import LLMEngine", 0.01, "max_num_batched_tokens=16384", {
            "model": "--pretrain", "dtype": "--bf16", "max_model_len": "--prompt_max_len and --generate_max_len",
            "tensor_parallel_size": "--engine_tp_size", "max_num_seqs": "--engine_max_seqs",
            "gpu_memory_utilization": "--engine_mem_util", "kv_cache_memory_bytes": "--engine_kv_mib",
            "enable_sleep_mode": "--engine_sleep", "quantization": "--engine_quantization",
            "quantization_config": "--engine_quantization", "enable_lora": "--lora_sync",
        }, ("load_format", "logprobs_mode", "distributed_executor_backend", "skip_tokenizer_init", "generation_config",
            "enable_chunked_prefill", "mm_device_do_normalize", "pipeline_parallel_size", "data_parallel_*",
            "*_context_parallel_size", "nnodes", "node_rank", "*lora*", "spec*", "logits_processors",
            "watermark_config", "hf_overrides", "trust_remote_code"),
        own_weights=True, measures_work=True, adapters=True, rounds_float32=True, first_temperature=True,
        min_p_first=True, rope=("longrope", ), counts_media=True, reads_media=True),
    "sglang": EngineCaps(
        "SGLang", f"{install_command('sglang')}, in an environment without vLLM",
        "from sglang.srt.entrypoints.engine import Engine", 1e-6, "chunked_prefill_size=4096", {
            "model_path": "--pretrain", "dtype": "--bf16", "context_length": "--prompt_max_len and --generate_max_len",
            "tp_size": "--engine_tp_size", "max_running_requests": "--engine_max_seqs",
            "cuda_graph_max_bs_decode": "--engine_max_seqs", "mem_fraction_static": "--engine_mem_util",
            "max_total_tokens": "--engine_kv_mib", "enable_memory_saver": "--engine_sleep",
            "quantization": "--engine_quantization",
        }, ("load_format", "skip_tokenizer_init", "sampling_backend", "device", "base_gpu_id", "dp_size", "pp_size",
            "*cp_size", "moe_dp_size", "enable_dp_attention", "nnodes", "node_rank", "nccl_port",
            "tokenizer_worker_num", "*lora*", "speculative_*", "dllm_*", "trust_remote_code"),
        own_weights=True, own_process=True, buckets=True, rounds_float32=True, first_temperature=True,
        penalizes=False, rope=(), counts_media=True, states=False),
}  # yapf: disable
HF_CACHE_PART = 4  # --engine_kv_mib 0: the cache of the hf engine takes up to a quarter of the memory
HF_KEPT_PART = 32  # on a GPU the cache stays while the engine sleeps if it takes at most this part of the memory
HF_FUSED_PART, HF_MERGED_PART = 16, 5  # copies of joined weights take at most this part; with LoRA, merged, that one
HF_GRAPHS = 48  # at once: each takes memory for its kernels; of more shapes, those used last
MOST_HOST_CACHE = 4 * 2**30  # bytes of another engine's cache in host memory
SEQUENCES, MOST_SEQUENCES = 256, 1024  # that another engine runs at once: at least, and at most on a large device
LARGE_DEVICE = 70 * 2**30  # bytes (H100, H200)


def native_arguments(entries: list[str]) -> dict[str, Any]:
    """Parse ``--engine_args``: values are read as YAML (``true``, ``0.5``, ``{"a": 1}``)."""
    import yaml
    return {name: yaml.safe_load(value) for name, _, value in (entry.partition("=") for entry in entries)}


def host_cache(share: float, total: float) -> float:
    """Bytes of the cache of an engine that may take a ``share`` of ``total`` bytes of host memory."""
    return min(share * total, MOST_HOST_CACHE)


@dataclass
class EngineConfig:
    """The engine, the lengths that it is started for, the restriction of the sampled distribution, and what answers the
    turns of the model."""
    engine_type: str = option("hf", "rollout engine; hf needs no other package", ENGINES, common=True)
    prompt_max_len: int = option(1024, "longest prompt, in tokens; see --overlong_prompt", within=COUNT, common=True)
    generate_max_len: int = option(1024, "longest response, in tokens", within=COUNT, common=True)
    top_p: float = option(
        1.0, "nucleus sampling: sample only from the smallest set of tokens with this probability; "
        "1 is off", within=PROBABILITY)
    top_k: int = option(0, "sample only from the k most likely tokens; 0 is off", within=NON_NEGATIVE)
    min_p: float = option(0.0, "sample only from tokens at least this likely relative to the most likely one; 0 is off",
                          within="[0, 1)")
    stop: list[str] = option([], "strings that end a response (kept in it); each must be one token of the tokenizer")
    engine_kv_mib: int = option(
        0, "MiB for the engine's key-value cache; 0: hf a quarter of the device's memory, others by --engine_mem_util",
        within=NON_NEGATIVE, free=True)
    engine_mem_util: float = option(
        0.5,
        "vllm, sglang: share of the device's memory for weights and key-value cache; on a CPU, share of the host's "
        "memory for the caches of all ranks, at most 4 GiB each", within=PROBABILITY, read_by=("vllm", "sglang"),
        free=True)
    engine_tp_size: int = option(1, "vllm, sglang: consecutive ranks that run one engine together (tensor parallelism)",
                                 within=COUNT, read_by=("vllm", "sglang"), free=True)
    engine_count: int | None = option(
        None, "vllm, sglang: engines that the run has at least, one for each --engine_tp_size ranks; with fewer ranks "
        "it does not start", within=COUNT, why="--engine_type hf generates without such an engine",
        read_by=("vllm", "sglang"), free=True)
    engine_max_seqs: int = option(
        0, "limit on sequences that an engine runs at once; 0: hf as many as the cache holds, others the samples of a "
        "rollout per engine, at least 256 and at most 1024 (256 on a device with less than 70 GiB)",
        within=NON_NEGATIVE, free=True)
    fused_decode: bool = option(
        False, "hf: compute the attention of a decode step in one Triton kernel of this library. Off until a GPU has "
        "shown it right and faster (docs/gpu.md)", read_by=("hf", ), free=True)
    engine_quantization: str = option(
        "none", "vllm, sglang: store the engine's weights in 8 bits (CUDA); in training, correct the mismatch with "
        "--rollout_correction", ("none", "fp8"), read_by=("vllm", "sglang"))
    engine_args: list[str] = option([], "arguments passed to vLLM or SGLang itself, name=value, e.g. "
                                    "enforce_eager=true", read_by=("vllm", "sglang"))
    environment: str | None = option(
        None, "tools, game or user that answers the turns of the model: a python file 'path.py[:name]' with a class or "
        "a list of functions, or a registered name; it runs in worker processes (docs/environments.md)", path="program")
    max_turns: int = option(8, "limit on the turns of the model in one response", within=COUNT,
                            needs="environment FILE.py")
    env_images: int = option(
        0, "limit on the pictures that the environment shows in one response, of models that take pictures; a further "
        "one ends the response. 0: its pictures end the run", within=NON_NEGATIVE, needs="environment FILE.py",
        read_by=("hf", ))
    env_timeout_s: float = option(
        60.0, "seconds that an environment may take for one answer; a response whose environment takes longer is left "
        "unscored", within=POSITIVE, needs="environment FILE.py", free=True)
    env_workers: int = option(1, "worker processes per rank in which environments run", within=COUNT,
                              needs="environment FILE.py", free=True)

    @property
    def caps(self) -> EngineCaps:
        """Abilities of the engine."""
        return ENGINES[self.engine_type]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt together with the longest response."""
        return self.prompt_max_len + self.generate_max_len
