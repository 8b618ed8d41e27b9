"""Write ``report.html``: the curves of a run and a few of its samples, as one page that loads nothing else."""
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightrft import __version__
from lightrft.utils.curve import panels, read_metrics
from lightrft.utils.errors import optional_output
from lightrft.utils.play import FAILURES
from lightrft.utils.run_summary import duration, RunSummary, shares
from lightrft.utils.timer import Throttle
from lightrft.utils.trajectory_saver import jsonable

TEMPLATE = Path(__file__).with_name("report.html")
PLACE = "/* the data of the run */"
SAMPLE_BYTES = 14 << 20  # of the samples in a page
POINTS = 800  # of a curve; longer runs show means
INTERVAL_S, SHARE = 10.0, 100  # a page is written again after this time, and after SHARE times what the last one took
_FACTS = ("pretrain", "prompt_data", "train_data", "eval_data", "reward", "advantage_estimator", "policy_loss",
          "init_kl_coef", "actor_learning_rate", "learning_rate", "rollout_batch_size", "n_samples_per_prompt",
          "train_batch_size", "seed")  # yapf: disable


class Report:
    """Report of a run that is under way. The page is written at most every ``INTERVAL_S`` seconds and takes at most
    1 / ``SHARE`` of the time. Without room on the disk the run continues."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._throttle = folder, Throttle(INTERVAL_S, SHARE)

    def refresh(self) -> None:
        """Write the page if it is due."""
        self._throttle(self.write)

    def write(self) -> None:
        """Write the page, if the run has metrics; a page that cannot be written is a warning, and the run continues."""
        with optional_output("report.html"):
            write_report(self.folder)


def write_report(folder: Path) -> Path | None:
    """Write ``folder/report.html`` from ``metrics.jsonl``, ``samples.jsonl`` and ``config.yaml``; replace it at once.

    Returns:
        The path of the page; None without metrics.
    """
    metrics = folder / "metrics.jsonl"
    rows = read_metrics(metrics) if metrics.exists() else []
    if not rows:
        return None
    path = folder / "report.html"
    part = path.with_suffix(".html.part")
    try:
        part.write_bytes(_page(folder, rows).encode("utf-8", "replace"))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _page(folder: Path, rows: list[dict[str, Any]]) -> str:
    """Fill the template. ``<`` is escaped in all data, so that no text of a sample ends the script element."""
    data = json.dumps(jsonable(_data(folder, rows)), ensure_ascii=False)
    samples = ",".join(_fitting(_samples(folder), SAMPLE_BYTES))
    filled = f'{data[:-1]}, "records": [{samples}]}}'.replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, filled)


def _samples(folder: Path) -> list[str]:
    """Read the lines of ``samples.jsonl``; an incomplete last one is left out."""
    file = folder / "samples.jsonl"
    return file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []


def _fitting(lines: list[str], limit: int) -> list[str]:
    """Drop every second line, but not the last one, until they fit."""
    while len(lines) > 1 and sum(len(line.encode("utf-8")) for line in lines) > limit:
        lines = lines[::-1][::2][::-1]
    return lines


def _data(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    summary, points = RunSummary.of(rows), merge(rows)
    size = -(-len(points) // POINTS)
    shown = mean_rows(points, size)
    names = sorted({name for row in rows for name in row} - {"step"})
    options, facts = _options(folder)
    return {
        "title": folder.resolve().name, "version": __version__, "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "facts": facts, "options": options, "steps": summary.steps, "changes": list(map(vars, summary.changes)),
        "time": f"{duration(summary.seconds)} ({shares(summary)})", "tokens": summary.tokens,
        "panels": [{"title": title, "lines": lines} for title, lines in [*panels(rows), *_more(rows, summary)]],
        "mean_of": size, "x": [row["step"] for row in shown],
        "y": {name: [_short(row.get(name)) for row in shown] for name in names}
    }  # yapf: disable


def _more(rows: Sequence[dict[str, Any]], summary: RunSummary) -> list[tuple[str, dict[str, str]]]:
    """Return the panels that the picture of the curves lacks."""
    names = {name for row in rows for name in row}
    phases = {f"time/{name}_s": name for name in list(summary.phases)[:5]}
    found = [("loss of the policy", {"policy/loss": "policy"}), ("loss of the critic", {"critic/loss": "critic"}),
             ("gradient norm before clipping", _by_model(names, "grad_norm")),
             ("learning rate", _by_model(names, "lr")),
             ("turns of a response", {"env/turns/mean": "turns", "env/calls/mean": "calls"}),
             ("seconds that a response waits", {"env/wait_s/mean": "for its environment"}),
             ("environments that failed", {f"env/{cause}": cause for cause in FAILURES}),
             ("seconds per step", {"time/step_s": "step"} | phases),
             ("tokens per second", {"perf/tokens_per_s": "step", "rollout/tokens_per_s": "rollout"})]  # yapf: disable
    kept = [(title, {name: legend for name, legend in lines.items() if name in names}) for title, lines in found]
    return [(title, lines) for title, lines in kept if lines]


def _by_model(names: set[str], metric: str) -> dict[str, str]:
    """Return ``{metric: model}`` of all trained models."""
    return {name: name.partition("/")[0] for name in sorted(names) if name.endswith(f"/{metric}")}


def first_prompt(folder: Path) -> str | None:
    """Return the first prompt of ``samples.jsonl``, rendered; None without one."""
    return next((group["prompt"] for line in _samples(folder) for group in json.loads(line)["groups"]), None)


def merge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the lines of each step, in the order of the steps."""
    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        steps.setdefault(row["step"], {}).update(row)
    return [steps[step] for step in sorted(steps)]


def mean_rows(rows: Sequence[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Replace each run of ``size`` rows by one: the means of what was measured, at the last step."""
    if size < 2:
        return list(rows)
    return [_mean(rows[start:start + size]) for start in range(0, len(rows), size)]


def _mean(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sums: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                sums.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()} | {"step": rows[-1]["step"]}


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _options(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the text of ``config.yaml``, and the options at the head of the page."""
    path = folder / "config.yaml"
    if not path.exists():
        return "", {}
    import yaml
    text = path.read_text(encoding="utf-8")
    tree = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    flat = {name: value for group in tree.values() if isinstance(group, dict) for name, value in group.items()}
    values = {name: flat[name] for name in _FACTS if flat.get(name) not in (None, "", [])}
    return text, {name: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
                  for name, value in values.items()}  # yapf: disable
