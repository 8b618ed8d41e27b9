"""Resumable checkpoints: sharded, atomic, written in the background, loadable with any number of ranks.

    step_000010/
        tensors/      torch.distributed.checkpoint: models and optimizers under the parameters' names
        global.pt     state that the trainer keeps once
        rank_00000.pt ... state that every rank keeps (random states, positions)
        COMPLETE.json step, world size, metrics, optimizers, size (and for small files CRC) of every file; written last

A checkpoint is written as ``.step_000010.tmp`` and renamed when it is complete; older ones are removed only after
that. All ranks must see the same folder.
"""
import io
import logging
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from lightrft.strategy.base import Prepared, StrategyBase, trained
from lightrft.strategy.checkpoint_folders import (back_up, complete, fresh, marker, newest, remove, room, rotate,
                                                  step_name, temporary_name, unusable, write)
from lightrft.strategy.plain_pickle import load_state, PlainReader
from lightrft.utils.errors import UserError

logger = logging.getLogger(__name__)
FAILURES = (OSError, RuntimeError, CheckpointException)  # what a full disk, or a rank that met one, raises


class CheckpointManager:
    """Manager that saves, finds, loads and rotates the checkpoints of one run. Creating it is a collective.

    Args:
        strategy: gives ranks, state and collectives.
        folder: folder of the checkpoints; created by the first save.
        keep: how many of the newest are kept (at least 1).
        keep_gib: GiB all of them may take; the newest and the best stay in any case.
        best_metric: the checkpoint with the highest value of this metric is never rotated away.
        asynchronous: write in the background; the state is copied to host memory first.
    """

    def __init__(self, strategy: StrategyBase, folder: Path, keep: int = 3, keep_gib: float = 1e8,
                 best_metric: str | None = None, asynchronous: bool = True) -> None:
        self.strategy, self.folder = strategy, Path(folder)
        self.keep, self.keep_gib, self.best_metric = max(1, keep), keep_gib, best_metric
        self.asynchronous = asynchronous
        self.group = strategy.mesh.new_group() if strategy.distributed else None  # apart from the training's
        if self.group is None:
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is meant
        self.failures = 0
        self._thread: threading.Thread | None = None
        self._succeeded = True
        self._warned = False  # that no checkpoint has the best metric

    # -- writing ------------------------------------------------------------------------------------------------------
    def save(self, step: int, prepared: dict[str, Prepared], global_state: dict[str, Any], rank_state: dict[str, Any],
             metrics: dict[str, float]) -> bool:
        """Save the whole state at ``step``; a collective. Wait for the previous save first.

        Returns:
            False when this save failed (a full disk: warned, counted in ``failures``, earlier checkpoints intact). An
            asynchronous save returns True at once; :meth:`wait` returns its result.
        """
        self.wait()
        tensors = BlockingAsyncStager().stage(self._tensors(prepared)) if self.asynchronous else self._tensors(prepared)
        blobs = {f"rank_{self.strategy.rank:05d}.pt": _to_bytes(rank_state)}
        if self.strategy.is_main:
            blobs["global.pt"] = _to_bytes(global_state)
        info = {"step": step, "world_size": self.strategy.world_size, "metrics": dict(metrics),
                "optimizers": _optimizers(prepared)}  # yapf: disable
        self._thread = threading.Thread(target=self._write, args=(info, tensors, blobs), daemon=True, name="checkpoint")
        self._thread.start()
        return True if self.asynchronous else self.wait()

    def wait(self) -> bool:
        """Wait for the save in progress; return whether the last save succeeded (True if there was none)."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._succeeded

    def _tensors(self, prepared: dict[str, Prepared]) -> dict[str, Any]:
        return {
            f"{name}/{key}": value for name, one in prepared.items()
            for key, value in self.strategy.state_dict(one).items()
        }

    def _write(self, info: dict[str, Any], tensors: dict[str, Any], blobs: dict[str, bytes]) -> None:
        """Run the phases; after each, all ranks agree on whether to continue (a rank must not fail alone inside a
        collective)."""
        if self.strategy.device.type == "cuda":  # a new thread is on GPU 0, where every rank would open a context
            torch.cuda.set_device(self.strategy.device)
        self._succeeded = False
        temporary = self.folder / temporary_name(info["step"])
        self._succeeded = (self._phase(lambda: fresh(temporary) if self.strategy.is_main else None)
                           and self._phase(lambda: self._write_blobs(temporary, blobs))
                           and self._phase(lambda: self._write_tensors(temporary / "tensors", tensors))
                           and self._phase(lambda: self._finish(temporary, info) if self.strategy.is_main else None))
        if not self._succeeded:
            self.failures += 1
            if self.strategy.is_main:
                remove(temporary)

    def _phase(self, work: Any) -> bool:
        """Run ``work``; return True if it succeeded on all ranks, else each failing rank logs a warning."""
        error = ""
        try:
            work()
        except FAILURES as failure:
            error = str(failure).strip().splitlines()[-1] if str(failure).strip() else type(failure).__name__
            logger.warning("rank %d could not save a checkpoint in %s (%s), earlier ones are kept: %s",
                           self.strategy.rank, self.folder, room(self.folder), error)
        try:
            return not any(self._gather(error))
        except RuntimeError as gone:
            logger.debug("a rank ended while a checkpoint was written: %s", gone)
            return False

    def _gather(self, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.strategy.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @staticmethod
    def _write_blobs(folder: Path, blobs: dict[str, bytes]) -> None:
        for name, blob in blobs.items():
            write(folder / name, blob)

    def _write_tensors(self, folder: Path, tensors: dict[str, Any]) -> None:
        dcp.save(tensors, storage_writer=FileSystemWriter(folder, overwrite=True), process_group=self.group,
                 no_dist=self.group is None)

    def _finish(self, temporary: Path, info: dict[str, Any]) -> None:
        complete(temporary, self.folder / step_name(info["step"]), info)
        best_is_known = rotate(self.folder, self.keep, self.keep_gib, self.best_metric)
        if not best_is_known and not self._warned:
            self._warned = True
            logger.warning(
                "--best_metric %s: no checkpoint has this metric, so the best one cannot be kept; the newest has %s",
                self.best_metric, ", ".join(sorted(info["metrics"])) or "none")

    def back_up(self) -> None:
        """Move the folder of an earlier run to ``FOLDER.1``, ``FOLDER.2``, ... before a new run; a collective.

        Otherwise old checkpoints of higher steps would rotate the new ones away, and be loaded instead of them.
        """
        if self.strategy.is_main:
            back_up(self.folder)
        self.strategy.barrier()

    # -- reading ------------------------------------------------------------------------------------------------------
    def latest(self) -> Path | None:
        """Find the newest complete checkpoint, the same on all ranks; a collective. Incomplete ones are skipped with a
        warning.

        Raises:
            UserError: there are checkpoints, but none is complete, or the folder itself is one.
        """
        self.wait()
        path = (newest(self.folder) or unusable(self.folder)) if self.strategy.is_main else None
        path = self.strategy.all_gather_object(path)[0]
        if isinstance(path, UserError):
            raise path
        return path

    def load(self, path: Path, prepared: dict[str, Prepared]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Fill the models, optimizers and schedules from ``path``; a collective. In a plan nothing is filled.

        Returns:
            the global state, and the state of every rank that saved, in rank order.

        Raises:
            UserError: the checkpoint is of another optimizer or of another model; names the first tensor that is
                missing or has another shape. Nothing has been loaded then.
        """
        path = Path(path)
        _check_optimizers(path, _optimizers(prepared))
        reader = PlainReader(path / "tensors")
        tensors = self._tensors(prepared)
        _check_fit(path, tensors, reader.read_metadata().state_dict_metadata, list(prepared))
        if self.strategy.plans:
            return read_global(path), []
        dcp.load(tensors, storage_reader=reader, process_group=self.group, no_dist=self.group is None)
        for name, one in prepared.items():
            prefix = f"{name}/"
            own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            self.strategy.load_state_dict(one, own)
        ranks = range(marker(path)["world_size"])
        return read_global(path), [load_state(path / f"rank_{rank:05d}.pt") for rank in ranks]


def _optimizers(prepared: dict[str, Prepared]) -> dict[str, str]:
    """Return the value of ``--optim`` for each trained model."""
    return {name: trained(one).name for name, one in prepared.items() if one.optimizer is not None}


def _check_optimizers(path: Path, chosen: dict[str, str]) -> None:
    """Raise UserError for a model whose state is of another optimizer; older checkpoints do not name theirs."""
    for name, saved in marker(path).get("optimizers", {}).items():
        if chosen.get(name, saved) != saved:
            raise UserError(f"--optim {chosen[name]}: {path} has the state of --optim {saved}, which cannot be "
                            f"converted; resume with --optim {saved}, or start a new run from the exported model")


def _check_fit(path: Path, wanted: dict[str, Any], saved: dict[str, Any], names: list[str]) -> None:
    """Raise UserError at the first tensor that only one side has, or that differs in shape."""
    with_optimizer = {name for name in names if f"{name}/schedule/step" in wanted}
    for key, value in wanted.items():
        if key not in saved:
            raise UserError(f"{path} is a checkpoint of another model: it has no tensor {key}")
        size = saved[key].size if isinstance(saved[key], TensorStorageMetadata) else None
        if size != value.shape:
            raise UserError(f"{path} is a checkpoint of another model: {key} has shape {list(size or [])} there and "
                            f"{list(value.shape)} here")
    for key in saved:
        name, kind, _ = key.split("/", 2)
        if key not in wanted and (name in with_optimizer or name in names and kind == "model"):
            raise UserError(f"{path} is a checkpoint of another model: this one has no tensor {key}")


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def read_global(path: Path) -> dict[str, Any]:
    """Read the state that the trainer keeps once from the checkpoint ``path``."""
    return load_state(path / "global.pt")
