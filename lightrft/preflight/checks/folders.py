"""Checks of the free space in shared memory and at ``--save_path``."""
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lightrft.config.schema import Config
from lightrft.preflight.checks.devices import GIB
from lightrft.preflight.checks.finding import Finding
from lightrft.preflight.cost import ModelSize

SHM = Path("/dev/shm")
SHM_BYTES = GIB  # NCCL takes tens of MiB per rank, an engine with tensor parallelism more; Docker's default is 64 MiB


def check_shm(folder: Path = SHM) -> Iterator[Finding]:
    """Check the shared memory between the processes of a machine."""
    if not folder.is_dir():
        yield Finding("ok", str(folder), "this system has none")
        return
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.2f} GiB free"
    if free < SHM_BYTES:
        yield Finding("warn", str(folder), f"{text}, NCCL and engines may need {SHM_BYTES / GIB:g} GiB",
                      "docker run --shm-size 8g, or remount it larger")
    else:
        yield Finding("ok", str(folder), text)


def check_save_path(config: Config) -> Iterator[Finding]:
    """Check that ``--save_path`` can be written to and its disk is not full."""
    name, path = "--save_path", Path(config.checkpoint.save_path).expanduser().absolute()
    folder = _existing(path)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        yield Finding("fail", name, f"{path}: {folder} cannot be written to", "give another --save_path")
        return
    free = shutil.disk_usage(folder).free
    text = f"{path}: {free / GIB:.1f} GiB free"
    yield Finding("warn", name, text, "make room") if free < GIB else Finding("ok", name, text)


def check_disk(config: Config, size: ModelSize, critic: bool) -> Iterator[Finding]:
    """Check that ``--save_path`` has room for the files that the run will leave."""
    free = shutil.disk_usage(_existing(Path(config.checkpoint.save_path).expanduser().absolute())).free
    needed = run_bytes(config, size, critic)
    text = (f"checkpoints and the final model take at most {needed / GIB:.2f} of {free / GIB:.1f} GiB free (rollouts "
            "and logs not counted)")
    if needed > free:
        yield Finding("fail", "disk", text, "make room, lower --max_ckpt_num, or set --disable_ckpt")
    else:
        yield Finding("ok", "disk", text)


def _existing(path: Path) -> Path:
    """The nearest of a path and its parents that exists."""
    return next(part for part in (path, *path.parents) if os.path.exists(part))


def run_bytes(config: Config, size: ModelSize, critic: bool) -> float:
    """Bytes of the checkpoints there (float32 weights and, without LoRA, Adam's two moments; one more while the oldest
    is replaced) and of the final model."""
    c = config.checkpoint
    elsewhere, several = c.disable_ckpt or c.ckpt_path is not None, c.save_steps > 0
    copies = 0 if elsewhere else 1 + several * (c.max_ckpt_num + (c.best_metric is not None))
    one = size.total * ((4 if config.model.lora_rank else 12) * (2 if critic else 1) + 4 * c.save_hf_ckpt)
    return min(copies * one, c.max_ckpt_mem * GIB + one) + 4 * size.total
