"""Every algorithm and every recipe has its page, and the numbers of the docs are those of the committed matrix."""
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "docs").exists():
    pytest.skip("installed without its repository", allow_module_level=True)
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "benchmarks")]

import algorithm_pages  # noqa: E402
import learning_matrix  # noqa: E402
import matrix_report  # noqa: E402

from lightrft.algorithms import ADVANTAGES, CORRECTIONS, POLICY_LOSSES  # noqa: E402
from lightrft.config.algorithm_rules import AlgorithmFacts  # noqa: E402
from lightrft.config.cli import parse_config  # noqa: E402
from lightrft.config.options import options  # noqa: E402
from lightrft.config.recipes import RECIPES  # noqa: E402
from lightrft.config.schema import Config  # noqa: E402
from lightrft.config.validate import validate  # noqa: E402

WRITTEN = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "algorithms").glob("*.md")}


def result(run, seed, end):
    points = [[step, end * step / 4] for step in range(5)]
    return {"run": run, "seed": seed, "area": 0.5, "start": 0.25, "end": end, "seconds": 30.0, "tokens": 4000,
            "rewards": points, "held_out": points}  # yapf: disable


def test_every_algorithm_and_recipe_has_a_page():
    generated = algorithm_pages.pages()
    assert WRITTEN.keys() == generated.keys()
    for page, text in WRITTEN.items():
        assert f"{{include}} ../generated/algorithms/{page}.md" in text and "$$" in text, page
    for entry in algorithm_pages.entries():
        for name in entry.names:
            assert f"[`{name}`](algorithms/{entry.page}.md)" in algorithm_pages.index()
        assert f"## `--{entry.option}` `{entry.names[0]}`" in generated[entry.page]
    for recipe, (_, _, values) in RECIPES.items():
        page = generated[algorithm_pages.slug(recipe)]
        assert f"--recipe {recipe}" in page and all(f"`--{name} " in page for name in values)


@pytest.mark.parametrize("page", WRITTEN)
def test_flags_and_pages_that_a_page_names_exist(page):
    for flag in re.findall(r"--([a-z]\w+)", WRITTEN[page]):
        assert flag in options(Config), flag
    for link in re.findall(r"\]\((\w+)\.md\)", WRITTEN[page]):
        assert link in WRITTEN, link


def test_the_docs_show_the_committed_matrix():
    table = matrix_report.PLACES.page.read_text(encoding="utf-8").split(matrix_report.START)[1]
    results = matrix_report.load()
    expected = matrix_report.table(results) if results else "Not measured yet.\n"
    assert table.split(matrix_report.END)[0] == "\n" + expected, "python benchmarks/learning_matrix.py --docs"
    runs = {*RECIPES, *matrix_report.single_runs()}
    assert {found["run"] for found in results} <= runs, "measured what is gone"
    assert all(found["end"] - found["start"] >= learning_matrix.REQUIRED_GAIN for found in results
               if found["run"] in RECIPES)  # yapf: disable


def test_a_measured_run_is_shown(monkeypatch, tmp_path):
    run = "policy_loss=sapo"
    monkeypatch.setattr(algorithm_pages, "load", lambda: [result(run, 1, 0.875), result(run, 2, 0.625)])
    page, index = algorithm_pages.pages()["sapo"], algorithm_pages.index()
    assert "0.250 before, 0.875, 0.625 after 4 steps" in page and "(../generated/curves/policy_loss-sapo.png)" in page
    assert re.search(r"`sapo`.*\| 0.750 \|", index) and re.search(r"`gae`.*\| not measured \|", index)
    assert "Not measured yet" in algorithm_pages.pages()["gae"]
    seeds = algorithm_pages.load()
    matrix_report.draw_run(seeds, tmp_path / "run.png")
    matrix_report.draw_all(seeds, tmp_path / "all.png")
    assert all(path.read_bytes()[:4] == b"\x89PNG"
               for path in tmp_path.iterdir()) and len(list(tmp_path.iterdir())) == 2


def test_the_table_of_the_matrix():
    rows = matrix_report.table([result("grpo", 1, 1.0), result("grpo", 2, 0.5), result("policy_loss=sapo", 1, 0.75)])
    assert "| `grpo` | 0.500 | 0.250 | 1.000 0.500 | +0.250 | 4k | 30 |" in rows
    assert rows.split("\n\n")[1].startswith("| algorithm in the defaults |") and "| `policy_loss sapo` |" in rows


def test_which_run_shows_an_algorithm():
    assert matrix_report.run_of("advantage_estimator", ["group_norm", "grpo"]) == "grpo"
    assert matrix_report.run_of("advantage_estimator", ["gae"]) == "ppo"
    assert matrix_report.run_of("policy_loss", ["sapo"]) == "policy_loss=sapo"
    assert learning_matrix.SETTINGS.keys() <= {*RECIPES, *matrix_report.single_runs()}


@pytest.mark.parametrize("name", [*RECIPES, *matrix_report.single_runs()])
def test_the_options_of_every_run_are_accepted(name):
    words = ["--pretrain", "MODEL", "--prompt_data", "A", "--eval_data", "B", *learning_matrix.Run(name, 1).flags(2)]
    validate(parse_config(words).config, 1, AlgorithmFacts.gather(ADVANTAGES, POLICY_LOSSES, CORRECTIONS))
