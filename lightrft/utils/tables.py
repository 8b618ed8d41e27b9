"""Tables of a run on the console: one row per step, and one per data source of an evaluation. They fit the terminal."""
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO

from rich.console import Console
from rich.table import Table

HEADER_EVERY = 20
PLAIN_WIDTH = 120  # where there is no terminal


@dataclass(frozen=True)
class Column:
    """Column of the step table. ``read`` returns the number of a row, or None."""
    title: str
    width: int
    read: Callable[[Mapping[str, float]], float | None]
    write: Callable[[float], str] = "{:.3f}".format

    def cell(self, metrics: Mapping[str, float]) -> str:
        """Return the text of a cell; a number that is too long loses digits."""
        value = self.read(metrics)
        if value is None:
            return ""
        text = self.write(value)
        return text if len(text) < self.width else f"{value:.2g}"


def of_fixed_data(names: Iterable[str], metric: str) -> list[str]:
    """Return those of ``names`` that are the ``metric`` of a trainer on fixed data, such as sft/loss."""
    return [name for name in names if re.fullmatch(rf"(?!(policy|critic|eval|reward)/)\w+/{metric}", name)]


def _first(*names: str, learnt: str = "") -> Callable[[Mapping[str, float]], float | None]:
    """Read the first of these metrics that is present, else the metric ``learnt`` of a trainer on fixed data."""
    return lambda metrics: next(
        (metrics[name] for name in (*names, *of_fixed_data(metrics, learnt)) if name in metrics), None)


def _kl(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def _seconds(*names: str) -> Callable[[Mapping[str, float]], float | None]:
    """Read the seconds of all these phases together; None if the run has none of them."""

    def read(metrics: Mapping[str, float]) -> float | None:
        known = [metrics[f"time/{name}_s"] for name in names if f"time/{name}_s" in metrics]
        return sum(known) if known else None

    return read


def unscored_causes(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the number of unscored responses of a step by cause, most frequent first; with dynamic sampling of all
    that were generated."""
    prefix = "reward/generated_unscored/" if metrics.get("rollout/rounds", 0) > 0 else "reward/unscored/"
    found = {name.removeprefix(prefix): count for name, count in metrics.items() if name.startswith(prefix) and count}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def accuracies(names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that are an accuracy of held-out responses, pass@k; the least k first."""
    return sorted((name for name in names if re.fullmatch(r"eval/all/pass@\d+", name)),
                  key=lambda name: int(name.rpartition("@")[2]))


def mean_rewards(names: Collection[str]) -> list[str]:
    """Return those of ``names`` that are the mean reward of held-out responses, where no accuracy is defined; a run
    calls it reward@n, ``lightrft evaluate`` reward."""
    return [] if accuracies(names) else [name for name in names if re.fullmatch(r"eval/all/(reward@\d+|reward)", name)]


def _held_out(metrics: Mapping[str, float]) -> float | None:
    return _first(*accuracies(metrics), "eval/accuracy", "eval/loss")(metrics)


def _held_out_reward(metrics: Mapping[str, float]) -> float | None:
    return next((metrics[name] for name in mean_rewards(metrics)), None)


def _unscored(metrics: Mapping[str, float]) -> float | None:
    return sum(unscored_causes(metrics).values()) or None


def _rest(metrics: Mapping[str, float]) -> float | None:
    """Read the seconds of a step outside of the other phases."""
    if "time/step_s" not in metrics or "time/update_s" not in metrics:
        return None
    return max(metrics["time/step_s"] - sum(phase.read(metrics) or 0.0 for phase in _NAMED_PHASES), 0.0)


_NUMBERS = (
    Column("reward", 8, _first("reward/mean")),
    Column(
        "accuracy", 9,
        _first(*(f"reward/{part}/mean" for part in ("accuracy", "math", "exact", "choice", "answer")),
               learnt="accuracy")),
    Column("held-out", 9, _held_out),
    Column("held-out reward", 16, _held_out_reward),
    Column("unscored", 9, _unscored, "{:.0f}".format),
    Column("loss", 8, _first(learnt="loss"), "{:.4f}".format),
    Column("length", 8, _first("rollout/response_len/mean"), "{:.1f}".format),
    Column("turns", 7, _first("env/turns/mean"), "{:.1f}".format),
    Column("calls", 7, _first("env/calls/mean"), "{:.1f}".format),
    Column("KL", 9, _first("policy/kl_ref", "reward/kl", learnt="kl"), _kl),
    Column("entropy", 8, _first("policy/entropy")),
    Column("tokens/s", 9, _first("perf/tokens_per_s"), "{:.0f}".format),
    Column("step s", 8, _first("time/step_s"), "{:.2f}".format),
    Column("wait s", 8, _first("env/wait_s/mean"), "{:.2f}".format),
)
_two = partial(Column, write="{:.2f}".format)
_NAMED_PHASES = (
    _two("rollout", 8, _seconds("rollout", "greedy", "gather")),
    _two("scoring", 8, _seconds("reward")),
    _two("passes", 7, _seconds("old_logprobs", "ref", "teacher", "values", "overlapped_passes")),
    _two("update", 7, _seconds("update")),
)
_PHASES = (*_NAMED_PHASES, _two("rest", 7, _rest))
_STEP, _BAR = 6, "  |"


class StepTable:
    """Lines of the step table: the numbers that the run reports, then the seconds of its phases where there is room.

    The columns have fixed widths. The header is repeated every ``HEADER_EVERY`` rows, and when a column appears.

    Args:
        width: of the terminal; None: that of the terminal, or ``PLAIN_WIDTH`` without one.
        colour: write terminal codes; None: on a terminal.
    """

    def __init__(self, width: int | None = None, colour: bool | None = None) -> None:
        self._width, self._colour = screen() if width is None else (width, bool(colour))
        self._shown: list[Column] = []
        self._rows = 0

    def lines(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return the row of ``step``, after the header if it is due."""
        found = [column for column in (*_NUMBERS, *_PHASES) if column in self._shown or column.cell(metrics)]
        due = found != self._shown or self._rows % HEADER_EVERY == 0
        self._rows = 1 if found != self._shown else self._rows + 1
        self._shown = found
        row = self._line(str(step), [column.cell(metrics) for column in found])
        return [self._line("step", [column.title for column in found], "bold"), row] if due else [row]

    def _line(self, first: str, cells: list[str], style: str = "") -> str:
        """Render one line; columns that do not fit are left out from the right, the phases all at once."""
        numbers = [column for column in self._shown if column in _NUMBERS]
        while sum(column.width for column in numbers) + _STEP > self._width:
            numbers.pop()
        phases = self._shown[len(numbers):] if self._fits(numbers) else []
        table = Table.grid(padding=0)
        widths = [_STEP, *(column.width for column in numbers), *([len(_BAR)] if phases else []),
                  *(column.width for column in phases)]  # yapf: disable
        for width in widths:
            table.add_column(justify="right", width=width, no_wrap=True)
        texts = [first, *cells[:len(numbers)], *([_BAR] if phases else []), *cells[len(numbers):][:len(phases)]]
        table.add_row(*texts, style=style)
        return render(table, self._width, self._colour)[0]

    def _fits(self, numbers: list[Column]) -> bool:
        """Return True if all numbers and all phases have room."""
        wanted = sum(column.width for column in self._shown) + _STEP + len(_BAR)
        return len(numbers) == sum(column in _NUMBERS for column in self._shown) < len(self._shown) and \
            wanted <= self._width


def evaluation_table(metrics: Mapping[str, float]) -> list[str]:
    """Return the lines of an evaluation of several data sources: pass@k with its interval (the mean reward, where one
    has no accuracy), length, unscored.

    An evaluation of a single source has none: the step table shows its number.
    """
    prompts = {name.split("/", 1)[1].rpartition("/")[0]: int(value) for name, value in metrics.items()
               if name.startswith("eval/") and name.endswith("/prompts")}  # yapf: disable
    if len(prompts) < 3:  # "all" and one source
        return []
    passed = [name.rpartition("/")[2] for name in accuracies(metrics)]
    sources = sorted(prompts, key=lambda source: (source == "all", source))
    columns = {"held-out": sources, "prompts": [str(prompts[source]) for source in sources]}
    undefined = any(f"eval/{source}/{name}" not in metrics for name in passed for source in sources)
    if undefined or not passed:
        passed += sorted(name.rpartition("/")[2] for name in metrics if re.fullmatch(r"eval/all/reward@\d+", name))
    columns |= {name: [_with_interval(metrics, f"eval/{source}/{name}") for source in sources] for name in passed}
    columns |= {title: [f"{metrics[f'eval/{source}/{name}']:.0f}" for source in sources]
                for title, name in (("length", "len"), ("unscored", "unscored"))}  # yapf: disable
    return fitting(columns, ("held-out", ), ("length", "prompts", "unscored"))


def fitting(columns: Mapping[str, Sequence[str]], left: Container[str], optional: Iterable[str]) -> list[str]:
    """Return the lines of a table with columns that are as wide as their texts.

    Args:
        columns: the texts of each column, by its title.
        left: titles of the columns that begin at their left.
        optional: titles of the columns that a narrow terminal does not show, the first one to be left out first.
    """
    width, colour = screen()
    shown = dict(columns)
    for title in optional:
        if sum(max(map(len, (name, *texts))) + 2 for name, texts in shown.items()) - 2 > width:
            shown.pop(title, None)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in shown:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=True)
    for texts in zip(*shown.values()):
        table.add_row(*texts)
    return render(table, width, colour)


def _with_interval(metrics: Mapping[str, float], name: str) -> str:
    if name not in metrics:
        return ""
    if f"{name}/low" not in metrics:
        return f"{metrics[name]:.3f}"
    return f"{metrics[name]:.3f} [{metrics[f'{name}/low']:.2f}, {metrics[f'{name}/high']:.2f}]"


def screen() -> tuple[int, bool]:
    """Return the width of the lines on stderr, and True if they may have terminal codes."""
    console = Console(stderr=True)
    return (console.width, True) if console.is_terminal else (PLAIN_WIDTH, False)


def render(table: Table, width: int, colour: bool) -> list[str]:
    """Return the lines of a table; without ``colour`` as plain text."""
    console = Console(file=StringIO(), width=width, force_terminal=colour, color_system="standard" if colour else None,
                      highlight=False, markup=False)  # yapf: disable
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]
