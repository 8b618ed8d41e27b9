"""Whether a model and a batch fit on the devices, by the estimate that ``--dry_run`` prints."""
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightrft.cli.checks.devices import GIB, Device
from lightrft.cli.checks.finding import Finding
from lightrft.config.estimate import ModelSize, batch_summary, count_parameters, memory, model_size
from lightrft.config.flags import show
from lightrft.config.options import build, flatten
from lightrft.config.schema import Config
from lightrft.utils.errors import UserError

KV_SHARE = 4  # --engine_kv_mib 0 takes up to a quarter of the memory
OFFLOADS: tuple[dict[str, Any], ...] = ({"adam_offload": True}, {"strategy": "fsdp", "fsdp_cpu_offload": True})
SMALLER: tuple[dict[str, Any], ...] = ({"engine_kv_mib": 1024}, {"logprob_chunk_mib": 64}, {"lora_rank": 16})
MOST_RANKS = 1024


def check_model(config: Config) -> Iterator[Finding]:
    """The model's config can be read, is of a supported architecture and has positions for the lengths."""
    from lightrft.models.loader import check_context, parameter_shapes
    path, rollout = str(config.model.pretrain), config.rollout
    try:
        parameter_shapes(path)
        check_context(path, prompt_max_len=rollout.prompt_max_len, generate_max_len=rollout.generate_max_len)
        yield Finding("ok", "model", f"{path}: {size_of(path).total:,} parameters")
    except UserError as error:
        yield Finding("fail", "model", str(error))


def size_of(path: str) -> ModelSize:
    """Parameter counts: from the weights in a local folder as in ``--dry_run``, else from the config.

    Raises:
        ValueError: there is no such model.
    """
    if size := model_size(path) if Path(path).expanduser().is_dir() else None:
        return size
    from lightrft.models.loader import parameter_shapes
    return count_parameters(parameter_shapes(path))


def check_memory(config: Config, ranks: int, size: ModelSize, devices: list[Device],
                 critic: bool = False) -> Iterator[Finding]:
    """The batch, and one verdict per device."""
    yield Finding("ok", "batch", batch_summary(config, ranks))
    held = memory(config, ranks, size, critic)
    for device in devices:
        yield _verdict(config, ranks, size, device, critic, held)


def _verdict(config: Config, ranks: int, size: ModelSize, device: Device, critic: bool,
             held: dict[str, float]) -> Finding:
    together, largest = sum(held.values()), max(held, key=lambda name: held[name])
    name, room = f"memory {device.name}", device.free - together
    text = (f"{together / GIB:.2f} of {device.free / GIB:.2f} GiB free per rank, activations not counted; largest: "
            f"{largest} {held[largest] / GIB:.2f} GiB")
    if room < 0:
        return Finding("fail", name, f"does not fit: {text}", _remedy(config, ranks, size, device, critic, together))
    cache = 0 if config.rollout.engine_kv_mib else device.total / KV_SHARE
    if room < cache:
        return Finding("warn", name, f"fits, but not with the key-value cache of up to {cache / GIB:.2f} GiB: {text}",
                       f"--engine_kv_mib {max(1, int(room / 2) >> 20)} leaves as much for activations")
    return Finding("ok", name, f"fits: {text}")


def _remedy(config: Config, ranks: int, size: ModelSize, device: Device, critic: bool, together: float) -> str:
    """The first change after which it fits; if none does, the one that saves most."""
    plans = [(words, sum(memory(changed, count, size, critic).values()))
             for words, changed, count in _changes(config, ranks, device)]
    for words, needed in plans:
        if needed <= device.free:
            return f"{words} brings it to {needed / GIB:.2f} GiB"
    words, needed = min(plans, key=lambda plan: plan[1])
    if needed >= together:
        return "take a smaller model or a larger machine"
    return f"{words} brings it to {needed / GIB:.2f} GiB, which is still too much: take a smaller model"


def _changes(config: Config, ranks: int, device: Device) -> Iterator[tuple[str, Config, int]]:
    """What can be done about it, the least intrusive first. On a CPU offloading and more ranks save nothing."""
    on_gpu = device.name != "cpu"
    for change in (*(OFFLOADS if on_gpu else ()), *SMALLER):
        words = " ".join(f"--{name}" if value is True else f"--{name} {show(value)}" for name, value in change.items())
        yield words, build(Config, flatten(config) | change), ranks
    while on_gpu and ranks < MOST_RANKS:
        ranks *= 2
        yield f"{ranks} GPUs (--ranks {ranks})", config, ranks
