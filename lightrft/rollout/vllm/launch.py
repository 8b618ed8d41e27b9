"""Start of vLLM in this process: its environment, its arguments, and the process state that is restored after it."""
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from lightrft.config.engines import ENGINES, host_cache, native_arguments
from lightrft.config.schema import RolloutConfig
from lightrft.rollout.engines import has_states, sequences_at_once
from lightrft.rollout.vllm.states import state_arguments
from lightrft.utils.env import World, rng_state, set_rng_state, total_memory
from lightrft.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_MIB = 1 << 20
_ANY_SHARE = 0.01  # of the device; vLLM refuses to start where less is free, also if the size of the cache is given
_PASS_TOKENS = 8192  # of prompts in one forward pass, or one prompt
_GRAPHS, _GRAPH_STEP = 512, 16  # vLLM's own largest batch with a CUDA graph, and the step between the largest ones
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this process too
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # torchrun's ranks share the cores as the launcher says
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def engine_arguments(cfg: RolloutConfig, config: PretrainedConfig, device: torch.device, bf16: bool, world: World,
                     limit_s: int, media: dict[str, int] | None = None) -> dict[str, Any]:
    """Arguments that start vLLM for the model of ``config``. Its weights are random until the first sync.

    Args:
        limit_s: seconds of a collective. Without it vLLM has torch's own limits: ten minutes with NCCL, in which a rank
            may wait for the rewards of another.
        media: most media of each kind in a prompt; vLLM keeps no memory for other kinds.
    """
    cuda, longest = device.type == "cuda", cfg.longest
    arguments: dict[str, Any] = {
        "model": config.name_or_path,
        "dtype": "bfloat16" if bf16 else "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": config.get_text_config() is config,  # what is more than text has a processor
        "mm_device_do_normalize": False,  # its means and deviations would be random too, and no sync brings them
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled
        "max_model_len": longest,
        "max_num_batched_tokens": max(_PASS_TOKENS, longest),
        "enable_chunked_prefill": False,  # between chunks a seeded generator is set back by a guess, on CPUs not at all
        "tensor_parallel_size": cfg.engine_tp_size,
        "distributed_executor_backend": "external_launcher" if world.world_size > 1 else "uni",
        "distributed_timeout_seconds": limit_s,
        "cpu_distributed_timeout_seconds": limit_s,
        "enable_sleep_mode": cuda and cfg.engine_sleep,
        "enforce_eager": not cuda,
        "disable_log_stats": True,
        "quantization": None if cfg.engine_quantization == "none" else cfg.engine_quantization,
        "gpu_memory_utilization": _ANY_SHARE if cuda and cfg.engine_kv_mib else cfg.engine_mem_util,
        "kv_cache_memory_bytes": cfg.engine_kv_mib * _MIB or None,
    }
    if not cuda and not cfg.engine_kv_mib:
        room = total_memory(device) / world.local_world_size
        arguments["kv_cache_memory_bytes"] = int(host_cache(cfg.engine_mem_util, room))
    if config.get_text_config() is not config:
        arguments |= _media_arguments(media or {})
    if has_states(config):
        arguments |= state_arguments(config, cuda, bf16)
    memory = total_memory(device) if cuda else 0
    return _at_once(arguments | native_arguments(cfg.engine_args), cfg,
                    sequences_at_once(cfg, world.world_size, memory))


def _media_arguments(most: dict[str, int]) -> dict[str, Any]:
    """Limits of media and of what vLLM's cache keeps of them, and a hash for it that is installed."""
    limits: dict[str, Any] = {"limit_mm_per_prompt": {kind: most.get(kind, 0) for kind in ("image", "video", "audio")},
                              "mm_processor_cache_gb": 1.0}  # yapf: disable  (what --media_cache_mib is by default)
    return limits if find_spec("blake3") else limits | {"mm_hasher_algorithm": "sha256"}


def _at_once(arguments: dict[str, Any], cfg: RolloutConfig, sequences: int) -> dict[str, Any]:
    """Add how many sequences run at once (vLLM's own default is 128 here), and CUDA graphs for all of them.

    A step has a token of every running sequence, so a smaller ``max_num_batched_tokens`` bounds the default.
    """
    if not cfg.engine_max_seqs:
        sequences = min(sequences, arguments["max_num_batched_tokens"])
    graphs = min(2 * sequences, max(_GRAPHS, sequences))
    graphs = -(-graphs // _GRAPH_STEP) * _GRAPH_STEP
    return {"max_cudagraph_capture_size": graphs} | arguments | {
        "max_num_seqs": sequences, "max_num_batched_tokens": max(sequences, arguments["max_num_batched_tokens"])
    }


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Restore generators, thread count, the precision of float32 products, torch's own functions and the environment
    afterwards, except for variables of vLLM (others that it sets, such as LOCAL_WORLD_SIZE, would pass for those of
    torchrun)."""
    state, threads, set_threads = rng_state(), torch.get_num_threads(), torch.set_num_threads
    environment, precision = dict(os.environ), torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in environment and not name.startswith("VLLM_")]:
            del os.environ[name]
        os.environ.update(environment)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        set_rng_state(state)


class NativeStream:
    """CUDA stream of vLLM's work in this thread; without CUDA there is none.

    vLLM may replace the stream of the thread that starts it by one of its own (with tensor parallelism or experts), and
    remembers it. The trainer's work keeps its stream: DeepSpeed gathers weights on the default one, and takes it that
    what uses them is queued there too.
    """

    def __init__(self) -> None:
        self._own: Any = None  # vLLM's when it ran last; None: it has not run

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run vLLM on its stream, then return to the one before; each waits for what is queued on the other."""
        if not torch.cuda.is_available():
            yield
            return
        before = torch.cuda.current_stream()
        self._own = self._own or before
        with torch.cuda.stream(self._own):
            _wait(self._own, before)
            try:
                yield
            finally:
                self._own = torch.cuda.current_stream()
                _wait(before, self._own)


def _wait(stream: Any, other: Any) -> None:
    if stream != other:
        stream.wait_stream(other)


def keep_weights_unpacked() -> None:
    """Keep linear weights, and those of convolutions, unpacked on a CPU.

    vLLM would pack them into handles of oneDNN. The handle of a tied head is not renewed when the embedding is
    (log-probs were off by 0.1 after an update), and packed weights cannot be compared with the trainer's.
    """
    from vllm import _custom_ops
    _custom_ops._supports_onednn = False
    _keep_convolutions_unpacked()


@lru_cache(maxsize=None)
def _keep_convolutions_unpacked() -> None:
    """CPUs with AVX-512 for bfloat16 would hold those of layers with state in another order, which no update knows, and
    in another tensor than the one that layers of Mamba 2 look at."""
    from vllm import _custom_ops

    def unpacked(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda **given: kernel(**given | {"weight": given["weight"].flatten(1), "is_weight_packed": False})

    del _custom_ops.causal_conv1d_weight_pack  # vLLM packs nothing where it is missing
    for name in ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"):
        setattr(_custom_ops, name, unpacked(getattr(_custom_ops, name)))


@lru_cache(maxsize=None)
def rotate_every_head() -> None:
    """Give vLLM's rotary kernel of CPUs queries and keys of two dimensions.

    Of [N, heads, size] it takes the stride of a head for that of a token, and turns most heads by wrong angles. LFM2
    gives it that form: its log-probs were off by 0.1 nats.
    """
    from vllm import _custom_ops
    rotate = _custom_ops.rotary_embedding

    def of_tokens(positions: Tensor, query: Tensor, key: Tensor | None, *rest: Any) -> None:  # in place
        shape = (*positions.shape, -1)
        rotate(positions, query.view(shape), None if key is None else key.view(shape), *rest)

    setattr(_custom_ops, "rotary_embedding", of_tokens)


def take_short_windows() -> None:
    """Let vLLM take sounds of Qwen2-Audio in the windows of the model.

    vLLM checks that a window has 3,000 frames, as those of 30 s have, and computes with any number of them: the tower
    is Hugging Face's, which takes the frames of its positions alone.
    """
    from vllm.model_executor.models.qwen2_audio import Qwen2AudioFeatureInputs as Inputs
    from vllm.utils.tensor_schema import TensorShape
    mel, mask = TensorShape("na", "nmb", "frames"), TensorShape("na", "frames")
    Inputs.__annotations__ |= {"input_features": Annotated[Tensor | list[Tensor], mel],
                               "feature_attention_mask": Annotated[Tensor, mask]}  # yapf: disable


@contextmanager
def own_shared_memory() -> Iterator[None]:
    """Give the ranks of an engine on a CPU shared memory named for their run; the name goes once all have it open.

    vLLM's name for it is the same in every run: no second run could start alongside the first, or after its kill.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    names: set[str] = set()

    def group_name(communicator: Any) -> str:
        ranks = "-".join(map(str, communicator.ranks))
        names.add(name := f"lightrft-{os.environ['MASTER_PORT']}-{communicator.unique_name}-{ranks}")
        return name

    _CPUSHMDistributed.make_group_name = staticmethod(group_name)  # type: ignore[method-assign]  # a patch
    try:
        yield
    finally:
        for path in (path for name in names for path in Path("/dev/shm").glob(f"{name}_*")):
            path.unlink(missing_ok=True)


def start_engine(arguments: dict[str, Any], device: torch.device, model_type: str = "",
                 stream: NativeStream | None = None) -> "LLMEngine":
    """Start vLLM's engine in this process, for a model of ``model_type``; under torchrun every rank calls it.
    ``stream`` takes note of the one that vLLM chooses.

    Raises:
        UserError: vLLM is missing, does not know an argument, or cannot run the model with them.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with process_state_kept(), (stream or NativeStream()).entered():
        if device.type == "cpu":  # or vLLM compiles a few helpers at the first request, for seconds
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        try:
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine
        except ImportError as error:
            raise UserError(f"--engine_type vllm: cannot import vllm ({error}); run: "
                            f"{ENGINES['vllm'].install}") from error
        known = {one.name for one in fields(EngineArgs)}
        for name in set(arguments) - known:
            raise UserError(f"--engine_args {name}: vLLM has no such argument{did_you_mean(name, known)}")
        if device.type == "cpu":
            keep_weights_unpacked()
            rotate_every_head()
        if model_type == "qwen2_audio":
            take_short_windows()
        try:
            with own_shared_memory() if device.type == "cpu" else nullcontext():
                return LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"vLLM cannot run {arguments['model']}: {error}") from error
