"""Generated parts of the pages of ``docs/algorithms`` and of their index: facts, options, commands and curves.

    python docs/algorithm_pages.py

writes the tables of ``docs/algorithms.md`` and ``docs/recipes.md`` again.

The text and the formula of a page are written by hand. The page includes its generated part, which has one section for
each advantage estimator, policy loss, correction and recipe with the name of the page.
"""
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from learning_matrix import SETTINGS  # noqa: E402
from matrix_report import REGISTRIES, aliases, by_run, draw_run, load, run_of  # noqa: E402

from lightrft.algorithms.base import Advantage, Correction, Surrogate  # noqa: E402
from lightrft.algorithms.catalog import COLUMNS, cells_of, fields_of, tuned_by  # noqa: E402
from lightrft.config.options import show  # noqa: E402
from lightrft.config.presets import RECIPES  # noqa: E402
from lightrft.config.schema import Config  # noqa: E402
from lightrft.config.tree import options  # noqa: E402
from lightrft.preflight.report import recipe_table, semantics_table  # noqa: E402

TABLES = [HERE / "algorithms.md", HERE / "recipes.md"]
FIELDS = ("equation", "paper", "degenerate", "deviation")


class Entry(NamedTuple):
    """An algorithm as its page shows it."""
    option: str
    names: list[str]
    page: str
    entry: Advantage | Surrogate | Correction


def slug(name: str) -> str:
    """Return the file name of a page."""
    return name.replace("++", "_pp")


def entries() -> list[Entry]:
    """List every registered algorithm of the package."""
    return [
        Entry(option, names, slug(next((name for name in names if name in RECIPES), names[0])),
              REGISTRIES[option].get(names[0])) for option, found in aliases().items() for names in found
    ]


def pages() -> dict[str, str]:
    """Map each page to the generated part of its text."""
    found = dict.fromkeys([*map(slug, RECIPES), *(entry.page for entry in entries())])
    return {page: "\n".join(_page(page)) for page in found}


def _page(page: str) -> Iterator[str]:
    own = [entry for entry in entries() if entry.page == page]
    recipes = [name for name in RECIPES if slug(name) == page]
    for name in recipes:
        yield from _recipe(name)
    for entry in own:
        yield from _algorithm(entry)
    runs = dict.fromkeys([*recipes, *(run_of(entry.option, entry.names) for entry in own)])
    yield from ("## On the quickstart task", "")
    for run in runs:
        yield from _measured(run)


def _recipe(name: str) -> Iterator[str]:
    recipe = RECIPES[name]
    yield from (f"## `--recipe {name}`", "", f"{recipe.summary[0].upper()}{recipe.summary[1:]} (<{recipe.paper}>).", "",
                "| sets | meaning |", "|---|---|")  # yapf: disable
    for option, value in recipe.options.items():
        yield f"| `--{option} {show(value)}` | {_cell(options(Config)[option].help)} |"
    yield ""


def _algorithm(entry: Entry) -> Iterator[str]:
    doc, names = fields_of(entry.entry.fn), "` or `".join(entry.names)
    yield from (f"## `--{entry.option}` `{names}`", "", doc["summary"], "", "| | |", "|---|---|")
    for name in FIELDS:
        if name in doc:
            yield f"| {name} | {_cell(f'`{doc[name]}`') if name == 'equation' else _linked(doc[name])} |"
    yield ""
    known = options(Config)
    if tuned_by(entry.entry):
        yield from ("| reads | default | meaning |", "|---|---|---|")
    for option in (known[name] for name in tuned_by(entry.entry)):
        yield f"| `{option.flag}` | `{show(option.default)}` | {_cell(option.help)} |"
    yield ""


def _measured(run: str) -> Iterator[str]:
    option, _, value = run.rpartition("=")
    flags = f"--{option or 'recipe'} {value} {SETTINGS.get(run, '')}".strip()
    yield from (f"    make quickstart ARGS=\"{flags}\"", "")
    seeds = by_run(load()).get(run)
    if not seeds:
        yield from (f"Not measured yet: `python benchmarks/learning_matrix.py --recipes {run}`.", "")
        return
    ends = ", ".join(f"{seed['end']:.3f}" for seed in seeds)
    yield from (f"Held-out accuracy (sampled) {mean(seed['start'] for seed in seeds):.3f} before, {ends} after "
                f"{seeds[0]['held_out'][-1][0]} steps of 8 prompts x 4 samples, one number per seed; mean sampled "
                f"accuracy over the run {mean(seed['area'] for seed in seeds):.3f}. [All runs](../benchmarks.md).", "",
                f"![accuracy over the steps](../generated/curves/{picture(run)})", "")  # yapf: disable


def picture(run: str) -> str:
    """Return the file name of a run's curve."""
    return f"{slug(run).replace('=', '-')}.png"


def index() -> str:
    """Render the table of algorithms as Markdown, with links to the pages and the measured accuracy."""
    columns, results = [*COLUMNS, "held-out accuracy after"], by_run(load())
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for entry in entries():
        seeds = results.get(run_of(entry.option, entry.names))
        after = f"{mean(seed['end'] for seed in seeds):.3f}" if seeds else "not measured"
        names = ", ".join(f"[`{name}`](algorithms/{entry.page}.md)" for name in entry.names)
        cells = [names, *map(_linked, cells_of(entry.option, entry.names, entry.entry)[1:]), after]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    """Return the text of a page with every generated table between its marks."""
    for name, table in {"algorithms": index, "recipes": recipe_table, "semantics": semantics_table}.items():
        text = re.sub(rf"(?<=<!-- {name} -->\n).*(?=<!-- /{name} -->)", lambda _: table(), text, flags=re.DOTALL)
    return text


def draw(folder: Path) -> None:
    """Draw the curve of every measured run, unless there is one newer than the results."""
    from matrix_report import OUTPUTS
    folder.mkdir(parents=True, exist_ok=True)
    for run, seeds in by_run(load()).items():
        png = folder / picture(run)
        if not png.exists() or png.stat().st_mtime < OUTPUTS.data.stat().st_mtime:
            draw_run(seeds, png)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _linked(text: str) -> str:
    return re.sub(r"https?://[^\s,;)]+", r"<\g<0>>", _cell(text))


if __name__ == "__main__":
    for path in TABLES:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
