"""Every algorithm and every recipe has its page, and the numbers of the docs are those of the committed matrix."""
import argparse
import json
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

from lightrft.algorithms.catalog import COLUMNS, fields_of, tuned_by  # noqa: E402
from lightrft.config.cli import parse_config  # noqa: E402
from lightrft.config.presets import RECIPES  # noqa: E402
from lightrft.config.schema import Config  # noqa: E402
from lightrft.config.tree import options  # noqa: E402
from lightrft.preflight.validate import validate  # noqa: E402

WRITTEN = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "algorithms").glob("*.md")}


def result(run, seed, end):
    points = [[step, end * step / 4] for step in range(5)]
    return {"run": run, "seed": seed, "area": 0.5, "start": 0.25, "end": end, "cpu_seconds": 30.0, "tokens": 4000,
            "rewards": points, "held_out": points}  # yapf: disable


def test_every_algorithm_and_recipe_has_a_page():
    generated = algorithm_pages.pages()
    assert WRITTEN.keys() == generated.keys()
    for page, text in WRITTEN.items():
        assert f"{{include}} ../generated/algorithms/{page}.md" in text and "$$" in text, page
    head, _, *rows = algorithm_pages.index().splitlines()
    assert [cell.strip() for cell in head.split("|")[1:-2]] == [*COLUMNS]
    for entry, row in zip(algorithm_pages.entries(), rows, strict=True):
        doc = fields_of(entry.entry.fn)
        assert all(f"[`{name}`](algorithms/{entry.page}.md)" in row for name in entry.names)
        assert all(algorithm_pages._linked(text) in row for text in doc.values()), "a field is missing"
        assert f"| `--{entry.option}`" in row and all(f"`--{name}`" in row for name in tuned_by(entry.entry))
        assert f"## `--{entry.option}` `{entry.names[0]}`" in generated[entry.page]
    for recipe, (_, _, values) in RECIPES.items():
        page = generated[algorithm_pages.slug(recipe)]
        assert f"--recipe {recipe}" in page and all(f"`--{name} " in page for name in values)


def test_the_tables_of_the_docs_are_the_generated_ones():
    algorithms, recipes = (path.read_text(encoding="utf-8") for path in algorithm_pages.TABLES)
    for text in (algorithms, recipes):
        assert text == algorithm_pages.with_tables(text), "run: python docs/algorithm_pages.py"
    assert algorithms.count("\n| [`") == len(algorithm_pages.entries())
    assert all(f"\n| `{name}` |" in recipes for name in RECIPES) and "| meaning | option | `default` |" in recipes


@pytest.mark.parametrize("page", WRITTEN)
def test_a_page_says_what_changes_against_ppo(page):
    assert page == "ppo" or re.search(r"\bPPO\b", WRITTEN[page])


@pytest.mark.parametrize("page", WRITTEN)
def test_flags_and_pages_that_a_page_names_exist(page):
    for flag in re.findall(r"--([a-z]\w+)", WRITTEN[page]):
        assert flag in options(Config), flag
    for link in re.findall(r"\]\((\w+)\.md\)", WRITTEN[page]):
        assert link in WRITTEN, link


def test_the_docs_show_the_committed_matrix():
    text, results = matrix_report.OUTPUTS.page.read_text(encoding="utf-8"), matrix_report.load()
    shown = text.split(matrix_report.START)[1].split(matrix_report.END)[0]
    assert shown == matrix_report.section(results), "run: python benchmarks/learning_matrix.py --all --docs"
    assert matrix_report.OUTPUTS.picture.exists() == bool(results)
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
    assert "| `grpo` | 2 | 0.500 (0.500-0.500) | 0.250 | 0.750 (0.500-1.000) | +0.250 | 4k | 30 |" in rows
    assert rows.split("\n\n")[1].startswith("| algorithm in the defaults |") and "| `policy_loss sapo` |" in rows


def test_new_results_take_the_place_of_old_ones():
    old = [result("policy_loss=sapo", 1, 0.5), result("grpo", 1, 0.5), result("gone", 1, 0.5)]
    merged = matrix_report.merge(old, [result("dapo", 2, 1.0), result("dapo", 1, 1.0), result("grpo", 2, 1.0)])
    assert [(found["run"], found["seed"]) for found in merged] == [("grpo", 2), ("dapo", 1), ("dapo", 2),
                                                                   ("policy_loss=sapo", 1)]


def test_which_run_shows_an_algorithm():
    assert matrix_report.run_of("advantage_estimator", ["group_norm", "grpo"]) == "grpo"
    assert matrix_report.run_of("advantage_estimator", ["gae"]) == "ppo"
    assert matrix_report.run_of("policy_loss", ["sapo"]) == "policy_loss=sapo"
    assert learning_matrix.SETTINGS.keys() <= {*RECIPES, *matrix_report.single_runs()}


@pytest.mark.parametrize("name", [*RECIPES, *matrix_report.single_runs()])
def test_the_options_of_every_run_are_accepted(name, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "quickstart"))
    from train_colocate import DEFAULTS
    data = ["--pretrain", "MODEL", "--prompt_data", "A", "--eval_data", "B"]
    message = "\n".join(algorithm_pages._measured(name)).split('ARGS="')[1].split('"')[0].split()
    for words, defaults in ((learning_matrix.Run(name, 1).flags(2), None), (message, DEFAULTS)):
        config = parse_config([*data, *words], defaults=defaults).config
        validate(config, 2)


def test_what_a_run_leaves(tmp_path):
    lines = [{"step": 0, "eval/all/pass@1": 0.25},
             {"step": 1, "reward/exact/mean": 0.5, "rollout/tokens": 10.0},
             {"step": 2, "reward/exact/mean": 0.5, "reward/generated_mean": 0.75, "rollout/tokens": 30.0,
              "eval/all/pass@1": 0.875}]  # yapf: disable
    run = learning_matrix.Run("policy_loss=sapo", 3)
    found = learning_matrix.summary(run, lines, 1.0)
    assert (found["area"], found["start"], found["end"], found["tokens"]) == (0.625, 0.25, 0.875, 40)
    assert found["rewards"] == [[1, 0.5], [2, 0.75]] and found["held_out"] == [[0, 0.25], [2, 0.875]]
    run.file(tmp_path).parent.mkdir()
    run.file(tmp_path).write_text(json.dumps(found | {"flags": run.flags(2)}))
    assert learning_matrix.kept(run, tmp_path, 2) and not learning_matrix.kept(run, tmp_path, 3)


def test_recipes_that_gain_too_little_are_named(tmp_path, capsys):
    runs = [learning_matrix.Run(name, seed) for name in ("grpo", "gspo", "policy_loss=sapo") for seed in (1, 2)]
    for run in runs:
        run.file(tmp_path).parent.mkdir(exist_ok=True)
        found = result(run.name, run.seed, 1.0 if run.name == "grpo" or run.seed == 1 else 0.3125)
        run.file(tmp_path).write_text(json.dumps(found | {"flags": run.flags(2)}))
    args = argparse.Namespace(out=tmp_path, steps=2, docs=False)
    assert learning_matrix.report(runs, args) == ["gspo"] and "| `gspo` |" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "results.json").read_text())) == 6
    assert learning_matrix.report([learning_matrix.Run("ppo", 1)], args) == []


@pytest.mark.parametrize("timeout, reason", [(60, "no such file or folder"), (0.1, "more than 0 s")])
def test_a_run_that_fails_is_told_with_its_reason(tmp_path, capsys, timeout, reason):
    (tmp_path / "runs").mkdir()
    args = argparse.Namespace(out=tmp_path, steps=2, timeout=timeout, jobs=1)
    assert learning_matrix.train_all([learning_matrix.Run("grpo", 1)], args) == ["grpo (seed 1)"]
    said = capsys.readouterr()
    assert reason in said.err and "[1/1] grpo seed 1: failed; 0 min left" in said.out
