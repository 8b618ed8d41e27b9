"""Destinations of the metrics: metrics.jsonl always; the console table; the trackers of the run on request."""
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any

from lightrft.utils.errors import CaptureException, first_line, UserError
from lightrft.utils.logging import get_logger
from lightrft.utils.tables import evaluation_table, StepTable
from lightrft.utils.trackers import (AccelerateSink, require, Sink, TensorboardSink, tracker_refusal, TrackioSink,
                                     WANDB_ID, WandbSink)
from lightrft.utils.trajectory_saver import jsonable

_FSYNC_S = 10.0
_TABLE = ("prompt", "response", "reward", "advantage", "reference", "finish_reason")  # columns of a table of samples

# Names that verl and TRL give to our metrics, for existing dashboards. _EXACT: alias -> our metrics, summed. _PATTERNS:
# regular expression over our names -> template of the alias. An alias whose sources are absent is left out.
_EXACT: dict[str, dict[str, tuple[str, ...]]] = {
    "verl": {
        "actor/entropy": ("policy/entropy", ),
        "actor/pg_loss": ("policy/loss", ),
        "actor/kl_loss": ("policy/kl_ref", ),
        "actor/pg_clipfrac": ("policy/clip_frac_low", "policy/clip_frac_high"),
        "actor/ppo_kl": ("policy/kl_old", ),
        "actor/grad_norm": ("policy/grad_norm", ),
        "actor/lr": ("policy/lr", ),
        "critic/vf_loss": ("critic/loss", ),
        "critic/vf_explained_var": ("critic/explained_variance", ),
        "critic/values/mean": ("critic/value_mean", ),
        "response_length/clip_ratio": ("rollout/truncated_frac", ),
        "training/rollout_probs_diff_mean": ("rollout/mismatch/abs_dp_mean", ),
        "training/rollout_probs_diff_max": ("rollout/mismatch/abs_dp_max", ),
        "training/rollout_probs_diff_std": ("rollout/mismatch/abs_dp_std", ),
        "timing_s/gen": ("time/rollout_s", ),
        "timing_s/reward": ("time/reward_s", ),
        "timing_s/old_log_prob": ("time/old_logprobs_s", ),
        "timing_s/ref": ("time/ref_s", ),
        "timing_s/update_actor": ("time/update_s", ),
        "timing_s/update_weights": ("time/weight_sync_s", ),
        "timing_s/save_checkpoint": ("time/checkpoint_s", ),
        "timing_s/testing": ("time/eval_s", ),
        "timing_s/step": ("time/step_s", ),
        "perf/throughput": ("perf/tokens_per_s", ),
        "perf/mfu/actor": ("perf/mfu", ),
        "perf/max_memory_allocated_gb": ("perf/peak_mem_gib", ),
    },
    "trl": {
        "reward": ("reward/mean", ),
        "reward_std": ("reward/std", ),
        "frac_reward_zero_std": ("group/zero_spread_frac", ),
        "completions/mean_length": ("rollout/response_len/mean", ),
        "completions/min_length": ("rollout/response_len/min", ),
        "completions/max_length": ("rollout/response_len/max", ),
        "completions/clipped_ratio": ("rollout/truncated_frac", ),
        "clip_ratio/low_mean": ("policy/clip_frac_low", ),
        "clip_ratio/high_mean": ("policy/clip_frac_high", ),
        "clip_ratio/region_mean": ("policy/clip_frac_low", "policy/clip_frac_high"),
        "entropy": ("policy/entropy", ),
        "kl": ("policy/kl_ref", ),
        "loss": ("policy/loss", ),
        "grad_norm": ("policy/grad_norm", ),
        "learning_rate": ("policy/lr", ),
        "step_time": ("time/step_s", ),
    },
}
_PATTERNS: dict[str, tuple[tuple[str, str], ...]] = {
    "verl": (
        (r"reward/(mean|max|min)", r"critic/score/\1"),
        (r"reward/(mean|max|min)", r"critic/rewards/\1"),
        (r"advantage/(mean|max|min)", r"critic/advantages/\1"),
        (r"rollout/response_len/(mean|max|min)", r"response_length/\1"),
        (r"eval/(.+)/pass@(\d+)", r"val-core/\1/acc/best@\2"),
        (r"eval/(.+)/pass@1", r"val-core/\1/acc/mean@1"),
        (r"eval/(.+)/reward@(\d+)", r"val-core/\1/reward/mean@\2"),
    ),
    "trl": ((r"reward/(?!unscored/)(.+)/(mean|std)", r"rewards/\1/\2"), ),
}
ALIASES = ("none", *_EXACT)


def backup_path(path: Path, says: bool = True) -> Path | None:
    """Rename a file or folder to the first free ``STEM.1.SUFFIX``, ...; return its new path, or None.

    An empty file stays: a run that ended before its first step leaves one.

    Args:
        says: log it; False where the caller does.
    """
    if not path.exists() or path.is_file() and not path.stat().st_size:
        return None
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    renamed = path.rename(next(name for name in names if not name.exists()))
    if says:
        get_logger().info(f"{path} is of an earlier run and was renamed to {renamed.name}")
    return renamed


def alias_metrics(metrics: Mapping[str, float], style: str) -> dict[str, float]:
    """Return ``metrics`` and, in addition, each one under its name in ``style`` ("none", "verl" or "trl"), if any."""
    if style not in ALIASES:
        raise ValueError(f"unknown metric aliases {style!r}; known: {', '.join(ALIASES)}")
    merged = dict(metrics)
    for alias, sources in _EXACT.get(style, {}).items():
        if all(source in metrics for source in sources):
            merged[alias] = sum(metrics[source] for source in sources)
    for pattern, template in _PATTERNS.get(style, ()):
        for name, value in metrics.items():
            if match := re.fullmatch(pattern, name):
                merged[match.expand(template)] = value
    return merged


class JsonlSink(Sink):
    """``metrics.jsonl``: one line per call, keys sorted after ``step``, numbers that JSON lacks as null."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = open(path, "a", encoding="utf-8")
        self._synced = 0.0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line and flush it (a killed process loses nothing); write it through to the disk every 10 s."""
        self._file.write(json.dumps({"step": step, **jsonable(dict(sorted(metrics.items())))}) + "\n")
        self._file.flush()
        if time.monotonic() - self._synced > _FSYNC_S:
            self._synced = time.monotonic()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write everything through to the disk and close the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class ConsoleSink(Sink):
    """A line of the step table every ``every`` steps; steps with an evaluation are always shown, with its table."""

    def __init__(self, every: int) -> None:
        self._every, self._table = max(every, 1), StepTable()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the row of ``step``."""
        if step % self._every == 0 or any(name.startswith("eval/") for name in metrics):
            for line in [*self._table.lines(step, metrics), *evaluation_table(metrics)]:
                get_logger().info(line, extra={"plain": True})


class MetricSinks:
    """All sinks of a run. Create it on rank 0 only.

    Args:
        folder: of the run; ``metrics.jsonl`` is stored directly in it.
        tensorboard: write TensorBoard events to ``folder/tensorboard``.
        wandb: arguments of ``wandb.init`` (project, name, group, entity), or None.
        trackio: arguments of ``trackio.init`` (project, name), or None.
        trackers: further trackers (:data:`lightrft.utils.trackers.ACCELERATE`), with project and name of ``naming``.
        aliases: "none", "verl" or "trl": repeat metrics under these names.
        logging_steps: steps between lines of the console table; every other sink gets every step.
        run_config: configuration of the run that W&B and trackio store.

    Raises:
        ImportError: a requested package is missing; the message names the extra that installs it.
    """

    def __init__(self, folder: str | Path, *, tensorboard: bool = False, wandb: Mapping[str, Any] | None = None,
                 trackio: Mapping[str, Any] | None = None, trackers: Sequence[str] = (),
                 naming: tuple[str, str | None] = ("lightrft", None), aliases: str = "none", logging_steps: int = 1,
                 run_config: Mapping[str, Any] | None = None) -> None:
        if aliases not in ALIASES:
            raise ValueError(f"unknown metric aliases {aliases!r}; known: {', '.join(ALIASES)}")
        self.folder, self._aliases, self._sinks = Path(folder), aliases, list[Sink]()
        self.path = self.folder / "metrics.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        asked = [("tensorboard", tensorboard, ""), ("wandb", wandb is not None, "wandb"),
                 ("trackio", trackio is not None, "trackio"), *((name, True, "") for name in trackers)]
        for package, wanted, extra in asked:
            if wanted:
                require(package, extra)
        config = run_config or {}
        self._openers: list[tuple[str, Callable[[int], Sink]]] = [  # with the option that asks for a tracker
            ("", lambda step: JsonlSink(self.path)), ("", lambda step: ConsoleSink(logging_steps))
        ]
        if tensorboard:
            self._openers.append(("use_tensorboard", lambda step: TensorboardSink(self.folder, step)))
        if wandb is not None:
            self._openers.append(("use_wandb", lambda step: WandbSink(self.folder, wandb, config)))
        if trackio is not None:
            self._openers.append(("use_trackio", lambda step: TrackioSink(trackio, config)))
        flat = {name: value for group in config.values() if isinstance(group, dict) for name, value in group.items()}
        for name in trackers:
            start = partial(AccelerateSink, name, *naming, self.folder, flat)
            self._openers.append((f"trackers {name}", lambda step, start=start: start()))  # type: ignore[misc]

    @classmethod
    def from_config(cls, config: Any, folder: str | Path, aliases: str = "none") -> "MetricSinks":
        """Build the sinks that the ``log`` group of a config tree selects."""
        log = config.log
        trackio = {"project": log.wandb_project, "name": log.wandb_run_name}
        wandb = trackio | {"group": log.wandb_group, "entity": log.wandb_org}
        return cls(folder, tensorboard=log.use_tensorboard, wandb=wandb if log.use_wandb else None,
                   trackio=trackio if log.use_trackio else None, trackers=log.trackers,
                   naming=(log.wandb_project, log.wandb_run_name), aliases=aliases, logging_steps=log.logging_steps,
                   run_config=asdict(config))

    def truncate_after(self, step: int) -> None:
        """Cut ``metrics.jsonl`` back to the checkpoint of ``step``. Call this before the first :meth:`log`.

        Later lines and an incomplete last one are dropped, so a resumed run writes the file of an uninterrupted one.
        With ``step`` 0 (a new run) an existing file is renamed to ``metrics.1.jsonl``, ...; so are the
        TensorBoard folder and the id of the W&B run.
        """
        if self._sinks:
            raise RuntimeError("truncate_after must come before the first log")
        if step <= 0:
            for left in (self.path, self.folder / "tensorboard", self.folder / WANDB_ID):
                backup_path(left)
        cut_after(self.path, step)

    def open(self, step: int) -> None:
        """Open every sink, for metrics from ``step`` on.

        Raises:
            UserError: a tracker cannot start.
        """
        for option, opener in self._openers:
            with CaptureException() as captured:
                self._sinks.append(opener(step))
            if captured.cause is None:
                continue
            if not option or not isinstance(captured.cause, Exception):
                raise captured.cause
            raise UserError(tracker_refusal(option, first_line(captured.cause))) from captured.cause

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write ``metrics`` of ``step`` to every sink; the first call opens them, if nothing has."""
        named = alias_metrics(metrics, self._aliases)
        for sink in self._opened(step):
            sink.log(step, named)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table of samples to every sink that has tables."""
        import pandas as pd
        shown = [{column: _cell(row.get(column)) for column in _TABLE} for row in rows]
        frame = pd.DataFrame(shown, columns=[*_TABLE])
        for sink in self._opened(step):
            sink.table(step, name, frame)

    def _opened(self, step: int) -> list[Sink]:
        if not self._sinks:
            self.open(step)
        return self._sinks

    def close(self) -> None:
        """Flush and close every sink; may be called twice."""
        while self._sinks:
            self._sinks.pop().close()


def _cell(value: Any) -> str | float | None:
    """Convert to what every table holds: a number, text or None."""
    return value if value is None or isinstance(value, (float, int, str)) else str(value)


def _step_of(line: bytes) -> float:
    """Return the step of a complete line, infinity for a damaged one."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else float("inf")
    except (ValueError, KeyError, TypeError):
        return float("inf")


def cut_after(path: Path, step: int) -> None:
    """Remove the lines of a jsonl file after ``step``, and damaged ones; do nothing without the file."""
    if not path.exists():
        return
    part = path.with_suffix(".jsonl.part")
    with open(part, "wb") as file:
        file.writelines(line for line in path.read_bytes().splitlines(keepends=True) if _step_of(line) <= step)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
