"""Report of the learning matrix: the run that measures each algorithm, the table, the pictures."""
import json
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from lightrft.algorithms import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from lightrft.config.presets import RECIPES

ROOT = Path(__file__).resolve().parents[1]
REGISTRIES = {"advantage_estimator": ADVANTAGES, "policy_loss": POLICY_LOSSES, "rollout_correction": CORRECTIONS}
HEADER = "| {} | seeds | reward area | held-out before | held-out after | gain, worst seed | tokens generated | CPU s |"
START, END = "<!-- learning matrix -->", "<!-- /learning matrix -->"

Results = list[dict[str, Any]]


class Outputs(NamedTuple):
    """Files of the matrix in the docs; the first is the source of the others."""
    data: Path
    page: Path
    picture: Path


OUTPUTS = Outputs(ROOT / "docs" / "data" / "learning_matrix.json", ROOT / "docs" / "benchmarks.md",
                  ROOT / "docs" / "images" / "learning_matrix.png")


def aliases() -> dict[str, list[list[str]]]:
    """Map each option to the names of each algorithm of the package; plug-ins are left out."""
    found = {}
    for option, registry in REGISTRIES.items():
        names: dict[int, list[str]] = {}
        for name in registry:
            if registry.get(name).fn.__module__.startswith("lightrft.algorithms."):
                names.setdefault(id(registry.get(name)), []).append(name)
        found[option] = list(names.values())
    return found


def run_of(option: str, names: list[str]) -> str:
    """Name the run of an algorithm: the recipe of its name, else the first recipe with it, else a separate run."""
    using = [recipe for recipe, found in RECIPES.items() if found.options.get(option) in names]
    return next((recipe for recipe in using if recipe in names), using[0] if using else f"{option}={names[0]}")


def single_runs() -> list[str]:
    """List ``option=name`` of every algorithm that no recipe uses."""
    runs = [run_of(option, names) for option, found in aliases().items() for names in found]
    return [run for run in runs if "=" in run]


def load() -> Results:
    """Load the committed results; empty before the matrix was run."""
    return json.loads(OUTPUTS.data.read_text(encoding="utf-8")) if OUTPUTS.data.exists() else []


def write(results: Results, path: Path) -> None:
    """Write one line per run, without the flags that only resuming needs."""
    rows = [{key: value for key, value in result.items() if key != "flags"} for result in results]
    lines = [json.dumps(row, separators=(",", ":")) for row in rows]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def merge(old: Results, new: Results) -> Results:
    """Add to ``new`` the runs of ``old`` that are not in it and still exist; in the order of the recipes."""
    order, names = [*RECIPES, *single_runs()], {result["run"] for result in new}
    found = [result for result in old if result["run"] in order and result["run"] not in names] + new
    return sorted(found, key=lambda result: (order.index(result["run"]), result["seed"]))


def replace_section(page: Path, start: str, end: str, text: str) -> None:
    """Write ``text`` between the marks ``start`` and ``end`` of a page."""
    whole = page.read_text(encoding="utf-8")
    page.write_text(f"{whole.split(start)[0]}{start}{text}{end}{whole.split(end)[1]}", encoding="utf-8")


def publish(results: Results) -> None:
    """Write data, table and picture into the docs; runs that were not repeated stay."""
    merged = merge(load(), results)
    OUTPUTS.data.parent.mkdir(exist_ok=True)
    write(merged, OUTPUTS.data)
    replace_section(OUTPUTS.page, START, END, section(merged))
    draw_all(merged, OUTPUTS.picture)


def by_run(results: Results) -> dict[str, Results]:
    """Group the results by run, one per seed."""
    found: dict[str, Results] = {}
    for result in results:
        found.setdefault(result["run"], []).append(result)
    return found


def table(results: Results) -> str:
    """Render Markdown: a table of the recipes, and one of the single algorithms if any was measured."""
    found = by_run(results)
    parts = []
    for title, names in (("recipe", [name for name in found if "=" not in name]),
                         ("algorithm in the defaults", [name for name in found if "=" in name])):
        if names:
            parts.append("\n".join([HEADER.format(title), "|---" * 8 + "|", *(row(found[name]) for name in names)]))
    return "\n\n".join(parts) + "\n"


def row(seeds: Results) -> str:
    """Render one run of the table, over its seeds."""
    area, ends = (band([seed[key] for seed in seeds]) for key in ("area", "end"))
    gain = min(seed["end"] - seed["start"] for seed in seeds)
    name = seeds[0]["run"].replace("=", " ")
    means = {key: mean(seed[key] for seed in seeds) for key in ("start", "tokens", "cpu_seconds")}
    return (f"| `{name}` | {len(seeds)} | {area} | {means['start']:.3f} | {ends} | {gain:+.3f} | "
            f"{means['tokens'] / 1e3:.0f}k | {means['cpu_seconds']:.0f} |")


def band(values: list[float]) -> str:
    """Render the mean over the seeds, and the lowest and the highest of them where there are several."""
    return f"{mean(values):.3f}" + (f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else "")


def section(results: Results) -> str:
    """Render the text between the marks of the page of benchmarks."""
    picture = "![held-out accuracy over the steps, a panel per run](images/learning_matrix.png)"
    return f"\n{table(results)}\n{picture}\n" if results else "\nNot measured yet.\n"


def draw_all(results: Results, png: Path, size: tuple[float, float] = (1.75, 1.5), aim: float | None = None) -> None:
    """Draw a panel of ``size`` inches per run: held-out accuracy, mean and band of the seeds; in grey ``aim``, or
    the mean of the first run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    found = by_run(results)
    if not found:
        return
    lines = -(-len(found) // 7)
    columns = -(-len(found) // lines)
    figure = Figure(figsize=(size[0] * columns, size[1] * lines + 0.3), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    reference = next(iter(found.values()))
    for panel, (name, seeds) in zip(panels, found.items()):
        if aim is None:
            panel.plot(*average(reference, "held_out"), color="0.7", linewidth=3)
        else:
            panel.axhline(aim, color="0.5", linewidth=1)
        steps, values = average(seeds, "held_out")
        points = [dict(map(tuple, seed["held_out"])) for seed in seeds]
        edges = [[edge(point[step] for point in points) for step in steps] for edge in (min, max)]
        panel.fill_between(steps, *edges, color="#1f77b4", alpha=0.25, linewidth=0)
        panel.plot(steps, values, color="#1f77b4", linewidth=1.5)
        panel.set_title(name.split("=")[-1], fontsize=9)
        panel.set_ylim(0, 1.02)
        panel.grid(alpha=0.25)
    for panel in panels[len(found):]:
        panel.axis("off")
    figure.supxlabel("step", fontsize=9)
    figure.supylabel(f"held-out accuracy (grey: {aim})" if aim else "held-out accuracy", fontsize=9)
    figure.savefig(png, format="png")


def draw_run(seeds: Results, png: Path) -> None:
    """Draw a run: sampled accuracy of each step, pale by seed and strong in the mean, and held-out accuracy by seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=(5, 2.6), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for seed in seeds:
        axes.plot(*zip(*seed["rewards"]), color="#1f77b4", linewidth=1, alpha=0.25)
        axes.plot(*zip(*seed["held_out"]), "o-", color="#d62728", linewidth=1, markersize=3, label="held-out, greedy")
    axes.plot(*average(seeds, "rewards"), color="#1f77b4", linewidth=2, label="sampled, mean of the seeds")
    legend = dict(zip(*reversed(axes.get_legend_handles_labels())))
    axes.legend(legend.values(), legend.keys(), frameon=False, fontsize=8, loc="lower right")
    axes.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(png, format="png")


def average(seeds: Results, key: str) -> tuple[list[int], list[float]]:
    """Compute steps and the mean over the seeds, where all of them have a point."""
    points = [dict(map(tuple, seed[key])) for seed in seeds]
    steps = sorted(set.intersection(*(set(point) for point in points)))
    return steps, [mean(point[step] for point in points) for step in steps]
