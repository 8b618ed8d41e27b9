"""Plot ``learning_curve.png`` from ``metrics.jsonl``."""
import json
import os
import re
from collections.abc import Sequence
from itertools import cycle
from math import isfinite
from pathlib import Path
from typing import Any

from lightrft.utils.tables import mean_rewards, of_fixed_data

_SMOOTH = 0.08  # window on either side of a point, as a share of the run
_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")
_SKIPPED_PARTS = ("unscored", "kl")
ACCURACY = "held-out accuracy"

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
    """Centred moving average over about a sixth of the run. The window shrinks evenly towards the start, where a run
    changes most; at the end, where single steps would look like a turn, it stays and a line is fitted to it."""
    most = round(len(values) * _SMOOTH)
    spans = [(min(i - min(most, i), len(values) - 1 - 2 * most), i + min(most, i) + 1) for i in range(len(values))]
    return [_fitted(values[start:end], i - start) for i, (start, end) in enumerate(spans)]


def _fitted(window: list[float], at: int) -> float:
    """Return the mean of a window that is centred ``at`` an index, else the value there of the line fitted to it."""
    mean, off = sum(window) / len(window), at - (len(window) - 1) / 2
    if not off:
        return mean
    centred = [i - at + off for i in range(len(window))]
    slope = sum(x * y for x, y in zip(centred, window)) / max(sum(x * x for x in centred), 1e-9)
    return mean + slope * off


def _held_out(names: set[str]) -> dict[str, str]:
    """Return ``{metric: legend}`` of the held-out accuracies: of each source if there are several, else of all."""
    found = [match for name in sorted(names) if (match := re.fullmatch(r"eval/(.+)/(pass@\d+)", name))]
    if len({match[1] for match in found} - {"all"}) < 2:
        return {match[0]: match[2] for match in found if match[1] == "all"}
    return {match[0]: f"{match[1]} {match[2]}" for match in found if match[1] != "all"}


def _learnt(names: set[str], metric: str) -> tuple[str, dict[str, str]]:
    """Return the panel of a metric of the trainers on fixed data."""
    return metric, {name: "training" for name in of_fixed_data(names, metric)} | {f"eval/{metric}": "held-out"}


def panels(rows: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, str]]]:
    """Return titles and ``{metric: legend}`` of the panels that this run has numbers for."""
    names = {name for row in rows for name in row}
    found = [match for name in sorted(names) if (match := re.fullmatch(r"reward/(.+)/mean", name))]
    parts = {match[0]: match[1] for match in found if match[1] not in _SKIPPED_PARTS}
    every = [
        ("reward", {"reward/mean": "sampled"}),
        (ACCURACY, _held_out(names)),
        ("held-out reward", {name: name.rpartition("/")[2] for name in mean_rewards(names)}),
        ("parts of the reward", parts),
        ("response length (tokens)", {"rollout/response_len/mean": "mean"}),
        ("KL (nats per token)", {"policy/kl_ref": "to the reference", "policy/kl_old": "to the old policy"}),
        ("entropy (nats)", {"policy/entropy": "policy"}),
        *(_learnt(names, metric) for metric in ("loss", "accuracy")),
    ]
    moving = {name for name in names if any(row.get(name) for row in rows)}  # a KL of 0 throughout says nothing
    shown = moving | {name for _, lines in every[:4] for name in lines} & names  # a reward of 0 throughout does
    kept = [(title, {name: legend for name, legend in lines.items() if name in shown}) for title, lines in every]
    return [(title, lines) for title, lines in kept if lines and not (lines == parts and len(parts) < 2)]


def plot_curve(metrics_jsonl: str | Path, png: str | Path) -> Path | None:
    """Draw the curves of a run: reward, held-out accuracy (or mean reward), parts of the reward, length, KL, entropy.

    Returns:
        The path of the picture; None when the file holds nothing to draw.
    """
    rows = read_metrics(metrics_jsonl)
    drawn = panels(rows)
    if not drawn:
        return None
    figure = draw(rows, drawn)
    png = Path(png)
    part = png.with_suffix(".part")
    figure.savefig(part, format="png")
    os.replace(part, png)
    return png


def draw(rows: Sequence[dict[str, Any]], drawn: list[tuple[str, dict[str, str]]]) -> Any:
    """Return the figure of the panels, three in a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    columns = min(len(drawn), 3)
    lines = -(-len(drawn) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * lines), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for number, (name, metrics) in enumerate(drawn, 1):
        _draw(figure.add_subplot(lines, columns, number), name, metrics, rows)
    return figure


def _draw(axes: Any, title: str, metrics: dict[str, str], rows: Sequence[dict[str, Any]]) -> None:
    """Draw one panel: raw points pale, their moving average strong; held-out numbers as points with their interval.

    The last held-out number is in the legend. An accuracy has the axis from 0 to 1; every axis includes 0.
    """
    for color, (name, legend) in zip(cycle(_COLORS), metrics.items()):
        steps, values = series(rows, name)
        if name.startswith("eval/"):
            last = f", last {values[-1]:.3f}" if values else ""
            axes.plot(steps, values, "o-", color=color, label=legend + last, markersize=4, linewidth=1)
            (_, low), (_, high) = series(rows, f"{name}/low"), series(rows, f"{name}/high")
            if len(low) == len(steps) == len(high):
                axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
            continue
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps, _smooth(values), color=color, label=legend, linewidth=2)
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    if title in (ACCURACY, "accuracy"):
        axes.set_ylim(-0.03, 1.03)
    else:
        drawn = [0.0, *(value for line in axes.lines for value in line.get_ydata() if isfinite(value))]
        least, most = min(drawn), max(drawn)
        axes.set_ylim(least - 0.07 * (most - least) * (least < 0), most + 0.07 * (most - least) * (most > 0)
                      or float(least == 0))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(metrics) > 1 or title == ACCURACY:
        axes.legend(frameon=False, fontsize=8)
