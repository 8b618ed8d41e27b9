"""Start of SGLang in this process: its environment, arguments, children and files, and the models that it refuses."""
import asyncio
import atexit
import json
import logging
import multiprocessing
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, ExitStack, suppress
from dataclasses import fields
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from lightrft.config.engines import ENGINES, host_cache, native_arguments
from lightrft.config.schema import RolloutConfig
from lightrft.rollout.sglang import scheduler_patches
from lightrft.rollout.sglang.media import take_processed_media
from lightrft.rollout.weight_sync.sync import WeightManifest
from lightrft.rollout.vllm.launch import process_state_kept
from lightrft.rollout.engines import sequences_at_once
from lightrft.utils.env import process_space, total_memory, World
from lightrft.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

_MIB, _GIB = 1 << 20, 1 << 30
_MOST_OF_FREE = 0.9  # of the device's free memory, for SGLang's weights and cache
_SPARE = 8  # tokens that SGLang keeps for itself at the end of a context
_LAUNCHER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
             "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_")  # yapf: disable


def _token_bytes(config: PretrainedConfig, bf16: bool, ranks: int) -> int:
    """Bytes of the keys and values of one token, on each of ``ranks``."""
    c = config.get_text_config()
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return 2 * c.num_hidden_layers * max(heads // ranks, 1) * dim * (2 if bf16 else 4)


def free_share(share: float, device: torch.device) -> float:
    """Convert a share of the memory of ``device`` to one of what is free, which SGLang takes: there the trainer's
    models are on the device already. A tenth of it stays for SGLang's activations and CUDA graphs.

    Raises:
        UserError: less is free.
    """
    torch.cuda.empty_cache()  # what torch keeps for later is not free for another process
    free, total = torch.cuda.mem_get_info(device)
    if share * total > _MOST_OF_FREE * free:
        fits = int(100 * _MOST_OF_FREE * free / total) / 100
        raise UserError(f"--engine_mem_util {share:g}: SGLang would take {share * total / _GIB:.1f} GiB, and "
                        f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB are free: at most {fits:g} fits, or move the "
                        "trainer away with --offload_during_rollout or --adam_offload")
    return share * (total / free)


def engine_arguments(cfg: RolloutConfig, config: PretrainedConfig, device: torch.device, bf16: bool,
                     world: World) -> dict[str, Any]:
    """Arguments that start SGLang for the HF folder of ``config``. Its weights are random until the first sync."""
    room = _token_bytes(config, bf16, cfg.engine_tp_size)
    cuda, longest = device.type == "cuda", cfg.longest + _SPARE
    sequences = sequences_at_once(cfg, world.world_size, total_memory(device) if cuda else 0)
    arguments: dict[str, Any] = {
        "model_path": config.name_or_path,
        "dtype": "bfloat16" if bf16 else "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "sampling_backend": "pytorch",  # our own sampler replaces it
        "context_length": longest,
        "tp_size": cfg.engine_tp_size,
        "device": device.type,
        "base_gpu_id": device.index or 0,
        "enable_memory_saver": cuda and cfg.engine_sleep,
        "mem_fraction_static": cfg.engine_mem_util,
        "max_running_requests": sequences,
        "cuda_graph_max_bs_decode": sequences if cuda else None,
        "max_total_tokens": cfg.engine_kv_mib * _MIB // room or None,
        "quantization": None if cfg.engine_quantization == "none" else cfg.engine_quantization,
        "sleep_on_idle": True,  # a scheduler without work would keep a core busy
        "log_level": "error",
    }
    if cuda:
        check_allocator()
        share = _MOST_OF_FREE if cfg.engine_kv_mib else free_share(cfg.engine_mem_util, device)
        arguments["mem_fraction_static"] = share
    else:
        arguments |= {"attention_backend": "torch_native", "disable_overlap_schedule": True, "disable_cuda_graph": True}
        if not cfg.engine_kv_mib:
            cache = host_cache(cfg.engine_mem_util, total_memory(device) / world.local_world_size)
            arguments["max_total_tokens"] = int(cache) // room
    if "hidden_activation" in (given := vars(config)) and "hidden_act" not in given:  # SGLang reads both of Gemma 2's
        arguments["json_model_override_args"] = json.dumps({"hidden_act": config.hidden_activation})
    arguments |= native_arguments(cfg.engine_args)
    check_cap(config, arguments.get("attention_backend"))
    return arguments


def start_engine(arguments: dict[str, Any], weights: WeightManifest, last_words: Connection,
                 cleanup: ExitStack) -> "Engine":
    """Start SGLang's engine for a trainer that sends ``weights``.

    Args:
        last_words: takes the error of a scheduler that fails.
        cleanup: undoes what outlasts the engine, or a start that fails.
    """
    try:
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.server_args import ServerArgs
    except ImportError as error:
        raise UserError(f"--engine_type sglang: cannot import sglang ({error}); run: "
                        f"{ENGINES['sglang'].install}") from error
    known = set(ServerArgs.__struct_fields__)
    for name in set(arguments) - known:
        raise UserError(f"--engine_args {name}: SGLang has no such argument{did_you_mean(name, known)}")
    folder = claim()
    cleanup.callback(remove, folder)

    class OwnEngine(Engine):
        """Engine without the process that would turn tokens into text, and without the end of all children."""
        run_scheduler_process_func = staticmethod(
            partial(scheduler_patches.run_scheduler, weights, os.getpid(), last_words))

        @classmethod
        def _launch_scheduler_processes(cls, server_args: Any, port_args: Any, *args: Any, **kwargs: Any) -> Any:
            move(port_args, folder)
            return super()._launch_scheduler_processes(server_args, port_args, *args, **kwargs)

        @staticmethod
        def init_tokenizer_manager_func(*args: Any) -> Any:
            take_processed_media()
            manager, templates = Engine.init_tokenizer_manager_func(*args)
            cleanup.callback(_close_sockets, manager.send_to_scheduler)
            return manager, templates

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            return [], []

        def shutdown(self) -> None:
            """Do nothing; SGLang registers it for the end of this process."""

    engine = OwnEngine(**arguments)
    engine.tokenizer_manager._subprocess_watchdog.stop()
    cleanup.callback(_close_sockets, engine.send_to_rpc)
    cleanup.callback(_end_tasks, engine.loop)
    return engine


def _close_sockets(one: Any) -> None:
    """Close all sockets of the context of ``one``. The garbage collector may reach the context before its sockets, and
    would then wait for them for ever."""
    one.context.destroy(linger=0)


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    for task in (tasks := asyncio.all_tasks(loop)):
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def check_allocator() -> None:
    """Refuse torch's expandable segments. SGLang's memory saver ends where it finds them, and handing their memory to
    another process takes rights of a debugger, which containers lack.

    Raises:
        UserError: the environment asks for them.
    """
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in (value := os.environ.get(name, "")).lower():
            raise UserError(f"{name}={value}: SGLang can neither release its memory nor receive the trainer's weights "
                            "with expandable_segments; remove it, or use --engine_type vllm")


@contextmanager
def isolated_environment(device: torch.device, tp_size: int) -> Iterator[int]:
    """Environment that SGLang needs while it starts: without torchrun's variables, by which its children would look for
    the trainer. It is restored afterwards. Yields a port where the children can meet."""
    root, method = logging.getLogger(), multiprocessing.get_start_method()
    handlers, level, policy = root.handlers[:], root.level, asyncio.get_event_loop_policy()
    with process_state_kept(), _port() as port:
        for name in [name for name in os.environ if name.startswith(_LAUNCHER)]:
            del os.environ[name]
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # the few tokens that it wants to spare
        if device.type == "cpu":
            os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}  # compiling takes 20 s there
            if tp_size > 1:
                os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores(tp_size))
        try:
            yield port
        finally:
            multiprocessing.set_start_method(method, force=True)
            asyncio.set_event_loop_policy(policy)
            root.handlers[:], root.level = handlers, level


@contextmanager
def _port() -> Iterator[int]:
    """Reserve a port that no other process is given before the schedulers use it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # they may listen too, with the same option
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def _cores(parts: int) -> str:
    """Cores of this process, divided among ``parts`` schedulers."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(",".join(map(str, cores[i::parts] or cores)) for i in range(parts))


_PREFIX, _IPC = "lightrft-sglang-", "ipc://"
_SOCKET_PATH, _SOCKET_NAME = 107, len("/00")  # bytes that Linux allows, and those that a socket adds


def claim() -> Path:
    """Create a folder for one engine; remove the folders of processes that were killed.

    Raises:
        UserError: sockets in it would have longer names than the system allows.
    """
    ours = f"{_PREFIX}{process_space()}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{ours}*"):
        if not Path("/proc", folder.name.removeprefix(ours).split("-")[0]).exists():
            remove(folder)
    folder = Path(tempfile.mkdtemp(prefix=f"{ours}{os.getpid()}-"))
    atexit.register(remove, folder)
    if (excess := len(os.fsencode(folder)) + _SOCKET_NAME - _SOCKET_PATH) > 0:
        raise UserError(f"TMPDIR {folder.parent}: SGLang's sockets there would have names of more than {_SOCKET_PATH} "
                        f"bytes; set TMPDIR to a path that is at least {excess} bytes shorter, such as /tmp")
    return folder


def move(ports: Any, folder: Path) -> None:
    """Let SGLang's ``PortArgs`` name sockets in ``folder``, not files of a random name, and name counters after it."""
    for i, field in enumerate(fields(ports)):
        name = getattr(ports, field.name)
        if isinstance(name, str) and name.startswith(_IPC):
            os.unlink(name.removeprefix(_IPC))
            setattr(ports, field.name, f"{_IPC}{folder}/{i}")
    ports.instance_id = folder.name


def remove(folder: Path) -> None:
    """Delete the folder and the counters in shared memory."""
    from sglang.srt.managers.load_snapshot import shm_path_for
    with suppress(OSError):  # it is not there, or another user's
        os.unlink(shm_path_for(folder.name))
    shutil.rmtree(folder, ignore_errors=True)


_REMEDY = "use --engine_type vllm or hf"


def check_cap(config: PretrainedConfig, attention_backend: str | None) -> None:
    """Refuse a model with capped attention logits (Gemma 2) where attention is torch's, as it is on a CPU."""
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if cap and attention_backend == "torch_native":
        raise UserError(f"SGLang's attention_backend torch_native, the one without kernels, does not cap attention "
                        f"logits, and this model does (attn_logit_softcapping {cap:g}); {_REMEDY}")


def check_window(config: PretrainedConfig, longest: int, known: int | None) -> None:
    """Refuse a model whose window is shorter than ``longest`` tokens where SGLang's window, ``known``, is None."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"])
    if window and slides and window < longest and known is None:
        raise UserError(
            f"this model's attention reaches back {window} tokens (sliding_window), which SGLang does "
            f"not implement for {text.model_type}, and a prompt with its response may have {longest}; shorten "
            f"--prompt_max_len or --generate_max_len, or {_REMEDY}")
