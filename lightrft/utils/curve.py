"""Plot ``learning_curve.png`` from ``metrics.jsonl``."""
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SMOOTH = 0.08  # window on either side of a point, as a share of the run
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_SKIPPED_PARTS = ("unscored", "kl")

Series = tuple[list[int], list[float]]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file; an incomplete last line is left out."""
    text = Path(path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]


def series(rows: Sequence[dict[str, Any]], name: str) -> Series:
    """Collect steps and values of one metric where it is a number."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _smooth(values: list[float]) -> list[float]:
    """Centred moving average over about a sixth of the run; the window shrinks evenly towards both ends."""
    last, most = len(values) - 1, round(len(values) * _SMOOTH)
    halves = [min(most, i, last - i) for i in range(len(values))]
    windows = [values[i - half:i + half + 1] for i, half in enumerate(halves)]
    return [sum(window) / len(window) for window in windows]


def panels(rows: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, str]]]:
    """Return titles and ``{metric: legend}`` of the panels that this run has numbers for."""
    names = {name for row in rows for name in row}
    found = [match for name in sorted(names) if (match := re.fullmatch(r"reward/(.+)/mean", name))]
    parts = {match[0]: match[1] for match in found if match[1] not in _SKIPPED_PARTS}
    heldout = {name: f"held-out {name.split('/')[-1]}" for name in sorted(names)
               if re.fullmatch(r"eval/all/(pass|avg)@1", name)} or \
              {name: f"held-out {name[5:]}" for name in sorted(names) if re.fullmatch(r"eval/[^/]+/pass@\d+", name)}
    if len(heldout) > 1 and "eval/all/avg@1" in heldout:
        heldout.pop("eval/all/avg@1")  # the same number as pass@1
    every = [
        ("reward", {"reward/mean": "sampled reward"} | heldout),
        ("parts of the reward", parts),
        ("response length (tokens)", {"rollout/response_len/mean": "mean"}),
        ("KL (nats per token)", {"policy/kl_ref": "to the reference", "policy/kl_old": "to the old policy"}),
        ("entropy (nats)", {"policy/entropy": "policy"}),
        ("loss", {"sft/loss": "training", "eval/loss": "held-out"}),
    ]
    moving = {name for name in names if any(row.get(name) for row in rows)}  # a line that is 0 throughout is left out
    kept = [(title, {name: legend for name, legend in lines.items() if name in moving}) for title, lines in every]
    return [(title, lines) for title, lines in kept if lines and not (lines == parts and len(parts) < 2)]


def plot_curve(metrics_jsonl: str | Path, png: str | Path, title: str = "") -> Path | None:
    """Draw the curves of a run: reward with held-out points, its parts, length, KL, entropy.

    Returns:
        The path of the picture; None when the file holds nothing to draw.
    """
    rows = read_metrics(metrics_jsonl)
    drawn = panels(rows)
    if not drawn:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    columns = min(len(drawn), 3)
    lines = -(-len(drawn) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * lines), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for number, (name, metrics) in enumerate(drawn, 1):
        _draw(figure.add_subplot(lines, columns, number), name, metrics, rows)
    if title:
        figure.suptitle(title)
    png = Path(png)
    part = png.with_suffix(".part")
    figure.savefig(part, format="png")
    os.replace(part, png)
    return png


def _draw(axes: Any, title: str, metrics: dict[str, str], rows: Sequence[dict[str, Any]]) -> None:
    """Draw one panel: raw points pale, their moving average strong; held-out numbers as marked points."""
    for color, (name, legend) in zip(_COLORS, metrics.items()):
        steps, values = series(rows, name)
        if name.startswith("eval/"):
            axes.plot(steps, values, "o-", color=color, label=legend, markersize=5, linewidth=1)
            if values:
                axes.annotate(f"{values[-1]:.3g}", (steps[-1], values[-1]), textcoords="offset points",
                              xytext=(-4, -14), ha="right", color=color)
            continue
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps, _smooth(values), color=color, label=legend, linewidth=2)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(metrics) > 1 or title == "reward":
        axes.legend(frameon=False, fontsize=9)
