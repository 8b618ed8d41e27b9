"""Facts about rollout engines that need no engine to be imported: names, install commands, arguments, cache sizes."""
from typing import Any

from lightrft.utils.errors import install_command

# values of --engine_type with the name for messages; lightrft.rollout.engines has the convention for their folders
ENGINES = {
    "hf": "the HF engine",
    "vllm": "vLLM",
    "sglang": "SGLang",
}
# engines that come from another package, of the same name
INSTALL = {
    "vllm": f"{install_command('vllm')} (without CUDA: pip install --no-deps -r requirements-vllm.txt)",
    "sglang": f"{install_command('sglang')}, in an environment without vLLM",
}
HF_CACHE_PART = 4  # --engine_kv_mib 0: the cache of the hf engine takes up to a quarter of the memory
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
