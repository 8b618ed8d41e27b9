"""Summary of a run, from the files in its folder: numbers before and after, seconds by phase, tokens."""
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from lightrft.utils.tables import mean_rewards, of_fixed_data, render, screen, unscored_causes

Row = dict[str, Any]

_EVALUATION = re.compile(r"eval/(all/(pass@\d+|reward@(?!1$)\d+)|loss|accuracy)")  # reward@1 repeats pass@1
_TOKENS = re.compile(r"\w+/tokens")  # of a step: generated, or read by a trainer on fixed data
SMALL = 5  # percent of the time; shorter phases are summed up
UNCUT = 1000  # width of the lines with paths where there is no terminal
_PARTS_OF_OTHERS = ("time/step_s", "time/update_s")  # sums of other times


@dataclass(frozen=True)
class Change:
    """Number at the start and at the end of a run, and its best value."""
    name: str
    before: float | None  # None: it was measured once
    after: float
    best: float
    best_step: int
    measured: str  # the steps of ``before`` and ``after``


@dataclass(frozen=True)
class RunSummary:
    """Numbers of a run up to its last step."""
    steps: int
    changes: list[Change]
    phases: dict[str, float]  # seconds by phase, the longest first
    tokens: int  # generated ones; in supervised fine-tuning those of the batches
    unscored: dict[str, int]  # responses without a reward, by cause

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(self.phases.values())

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "RunSummary":
        """Summarize the lines of ``metrics.jsonl``."""
        names = {name for row in rows for name in row}
        held_out = sorted({name for name in names if _EVALUATION.fullmatch(name)}.union(mean_rewards(names)))
        changes = [_evaluated(rows, name) for name in held_out]
        sampled = [name for name in ("reward/mean", ) if name in names]
        learnt = [name for metric in ("loss", "accuracy") for name in of_fixed_data(names, metric)]
        changes += [_trained(rows, name) for name in sampled + learnt]
        phases = {name[5:-2]: _total(rows, name) for name in names
                  if name.startswith("time/") and name not in _PARTS_OF_OTHERS}  # yapf: disable
        longest_first = dict(sorted(phases.items(), key=lambda item: -item[1]))
        tokens = sum(_total(rows, name) for name in names if _TOKENS.fullmatch(name))
        unscored = sum((Counter(unscored_causes(row)) for row in rows), Counter())
        return cls(rows[-1]["step"] if rows else 0, [each for each in changes if each], longest_first, int(tokens),
                   {cause: int(count) for cause, count in unscored.most_common()})


def _total(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)


def _points(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def _best(points: list[tuple[int, float]], name: str) -> tuple[int, float]:
    return (min if name.endswith("loss") else max)(points, key=lambda point: point[1])


def _evaluated(rows: Sequence[Row], name: str) -> Change | None:
    """Return the first and the last evaluation."""
    points = _points(rows, name)
    if not points:
        return None
    (first, before), (last, after), (step, best) = points[0], points[-1], _best(points, name)
    if len(points) == 1:
        return Change(name, None, after, best, step, f"step {last}")
    return Change(name, before, after, best, step, f"step {first} -> {last}")


def _trained(rows: Sequence[Row], name: str) -> Change | None:
    """Return the means over the first and the last tenth of the steps: a single batch is noise."""
    points = _points(rows, name)
    if not points:
        return None
    size, (step, best) = max(len(points) // 10, 1), _best(points, name)
    ends = [[value for _, value in part] for part in (points[:size], points[-size:])]
    before, after = (sum(part) / size for part in ends)
    first, last = (f"step {points[0][0]}", f"{points[-1][0]}") if size == 1 else (f"first {size}", f"last {size} steps")
    return Change(name, before if len(points) > 1 else None, after, best, step,
                  f"{first} -> {last}" if len(points) > 1 else f"step {points[-1][0]}")


def duration(seconds: float) -> str:
    """Format seconds: ``"4.2 s"``, ``"3 min 20 s"``, ``"5 h 7 min"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def shares(summary: RunSummary) -> str:
    """Format the share of each phase in the time, from 5 % on, and of the others together."""
    total = max(summary.seconds, 1e-9)
    parts = {name: round(100 * seconds / total) for name, seconds in summary.phases.items()}
    large = {name: percent for name, percent in parts.items() if percent >= SMALL and not name.endswith("other")}
    named = [*large.items(), ("other", (100 - sum(large.values())) * bool(parts))]
    return ", ".join(f"{name} {percent}%" for name, percent in named if percent > 0)


def summary_lines(summary: RunSummary, places: Mapping[str, object]) -> list[str]:
    """Return the lines of a summary on the console, plain text where there is no terminal.

    Args:
        places: where everything is, by its name.
    """
    width, colour = screen()
    changes = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "before", "after", "best", "measured"):
        changes.add_column(title, justify="right" if title in ("before", "after") else "left", no_wrap=True)
    for each in summary.changes:
        before = "" if each.before is None else f"{each.before:.4g}"
        changes.add_row(each.name, before, f"{each.after:.4g}", f"{each.best:.4g} (step {each.best_step})",
                        each.measured)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("time", f"{duration(summary.seconds)}: {shares(summary)}")
    facts.add_row("tokens", f"{summary.tokens:,}")
    if summary.unscored:
        causes = ", ".join(f"{cause} {count:,}" for cause, count in summary.unscored.items())
        facts.add_row("unscored", f"{sum(summary.unscored.values()):,} responses: {causes}")
    for name, place in places.items():
        facts.add_row(name, str(place))
    return (render(changes, width, colour) if summary.changes else []) + render(facts, width if colour else UNCUT,
                                                                                colour)
