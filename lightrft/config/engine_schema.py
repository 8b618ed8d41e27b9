"""Options of a rollout engine, for every command that generates: its kind, its memory, lengths and sampling."""
from dataclasses import dataclass

from lightrft.config.engines import ENGINES
from lightrft.config.options import COUNT, NON_NEGATIVE, PROBABILITY, option


@dataclass
class EngineConfig:
    """The engine, the lengths that it is started for, and the restriction of the sampled distribution."""
    engine_type: str = option("hf", "rollout engine; hf needs no other package", tuple(ENGINES), common=True)
    prompt_max_len: int = option(1024, "longest prompt, in tokens; see --overlong_prompt", within=COUNT, common=True)
    generate_max_len: int = option(1024, "longest response, in tokens", within=COUNT, common=True)
    top_p: float = option(1.0, "nucleus sampling: keep the smallest set of tokens with this probability; 1 is off",
                          within=PROBABILITY)
    top_k: int = option(0, "keep the k most likely tokens; 0 is off", within=NON_NEGATIVE)
    min_p: float = option(0.0, "keep tokens at least this likely relative to the most likely one; 0 is off",
                          within="[0, 1)")
    stop: list[str] = option([], "strings that end a response (kept in it); each must be one token of the tokenizer")
    engine_kv_mib: int = option(
        0,
        "MiB of key-value cache of the engine; 0: hf a quarter of the memory of the device, others --engine_mem_util",
        within=NON_NEGATIVE, free=True)
    engine_mem_util: float = option(
        0.5,
        "vllm, sglang: share of the device's memory for weights and key-value cache; on a CPU, of the host's for the "
        "caches of its ranks, at most 4 GiB each", within=PROBABILITY, read_by=("vllm", "sglang"), free=True)
    engine_tp_size: int = option(1, "vllm, sglang: consecutive ranks that run one engine together (tensor parallelism)",
                                 within=COUNT, read_by=("vllm", "sglang"), free=True)
    engine_max_seqs: int = option(
        0,
        "most sequences that an engine runs at once; 0: hf what the cache holds, others the samples of a rollout per "
        "engine, at least 256 and at most 1024 (256 on a device with less than 70 GiB)", within=NON_NEGATIVE, free=True)
    engine_quantization: str = option(
        "none",
        "vllm, sglang: hold the engine's weights in 8 bits (CUDA); in training --rollout_correction takes care of the "
        "mismatch", ("none", "fp8"), read_by=("vllm", "sglang"))
    engine_args: list[str] = option([], "arguments of vLLM's or SGLang's own, name=value, e.g. enforce_eager=true",
                                    read_by=("vllm", "sglang"))
