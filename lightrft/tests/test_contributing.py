"""Every recipe of docs/contributing.md, followed in one copy of the package: files, tests, commands."""
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import pytest
import yaml

from lightrft.tests.support import launch, runs, tiny_task
from lightrft.tests.support.python_server import PythonServer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contributing.md"
if not PAGE.exists():
    pytest.skip("installed without its repository", allow_module_level=True)
pytestmark = pytest.mark.slow
TINY = {name: value for name, value in runs.BASE.items() if name not in ("self_test", "sync_proof", "reward_probe")}
# of the tests that go through all losses, options and pages: the cases of the new loss, and those that count
CASES = "tanh or every_loss or each_algorithm or has_a_page or generated_one or is_missing or glossary or algorithms.md"
TINY_SFT = {"max_steps": 1, "train_batch_size": 2, "max_len": 64, "disable_ckpt": True}


@dataclass
class Recipe:
    """One section of the page: new files, lines that are inserted into other files, and commands."""
    title: str
    files: dict[str, str]
    insertions: dict[str, str]
    commands: list[str]

    @property
    def tests(self) -> list[str]:
        return [path for path in self.files if Path(path).name.startswith("test_")]

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The row of the table at the top of the page."""
        added = [line for text in self.insertions.values() for line in text.splitlines() if line.startswith("+")]
        return self.title, str(len(self.files) - len(self.tests)), str(len(self.tests)), str(len(added))

    def follow(self, tree: Path) -> None:
        """Write the files and insert the lines."""
        for path, text in self.files.items():
            assert not (tree / path).exists(), f"{path} is not a new file"
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text, encoding="utf-8")
        for path, text in self.insertions.items():
            for hunk in text.split("@@\n"):
                before = "".join(line[1:] for line in hunk.splitlines(keepends=True) if line.startswith(" "))
                after = "".join(line[1:] for line in hunk.splitlines(keepends=True))
                old = (tree / path).read_text(encoding="utf-8")
                assert old.count(before) == 1, f"{path} has no lines {before!r}"
                (tree / path).write_text(old.replace(before, after), encoding="utf-8")


def recipes() -> dict[str, Recipe]:
    """The recipes of the page by title."""
    found = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title = section.partition("\n")[0]
        named = re.findall(r"^\*\*`([^`]+)`\*\*\n\n(````?)(\w+)\n(.*?)^\2$", section, re.MULTILINE | re.DOTALL)
        files = {path: text for path, _, kind, text in named if kind != "diff"}
        insertions = {path: text for path, _, kind, text in named if kind == "diff"}
        blocks = re.findall(r"^```bash\n(.*?)\n```", section, re.MULTILINE | re.DOTALL)
        if files:
            found[title] = Recipe(title, files, insertions, [line for block in blocks for line in block.splitlines()])
    return found


RECIPES = recipes()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A tiny model, prompts, demonstrations and a reward with spread."""
    home = runs.write_home(tmp_path_factory.mktemp("home"))
    (home / "letters.py").write_text(tiny_task.REWARD, encoding="utf-8")
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(4)]
    (home / "demos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return home


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the package in which every recipe is followed. None of them needs another one."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("lightrft", "docs", "benchmarks", "examples"):  # with bytecode: times of files stay as they are
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("_build"))
    for path in (ROOT / "setup.cfg", ROOT / "Makefile", *ROOT.glob("*.md")):
        shutil.copy(path, tree)
    for recipe in RECIPES.values():
        recipe.follow(tree)
    return tree


@pytest.fixture(scope="module")
def python(tree):
    """Python in the copy, which is the package that it imports."""
    server = PythonServer(tree)
    yield server
    server.close()


def train(python: PythonServer, tree: Path, home: Path, command: str, **more: int) -> tuple[dict, list[dict]]:
    """Run a command of the page in tiny sizes and ``more``; return its options, flat, and its metrics."""
    files = {"MODEL": home / "model", "DATA": home / "train.jsonl", "DEMOS": home / "demos.jsonl",
             "REWARD": home / "letters.py"}  # yapf: disable
    words = [str(files.get(word, word)) for word in command.split()]
    assert words[0] == "python", command
    sizes = TINY_SFT if "DEMOS" in command else TINY
    shutil.rmtree(tree / "out", ignore_errors=True)
    python.run(*words[1:], *launch.flags(sizes | {"save_path": tree / "out"} | more))
    options = yaml.safe_load((tree / "out" / "config.yaml").read_text(encoding="utf-8"))
    flat = {name: value for group in options.values() if isinstance(group, dict) for name, value in group.items()}
    return flat, runs.read_lines(tree / "out" / "metrics.jsonl")


def test_the_table_counts_the_files():
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text(encoding="utf-8").splitlines()
             if line.startswith("| [")]  # yapf: disable
    shown = [(cell[0].partition("]")[0][1:], *cell[1:]) for cell in cells]
    assert shown == [recipe.row for recipe in RECIPES.values()]


def test_no_recipe_needs_another():
    for one, other in permutations(RECIPES.values(), 2):
        words = set(re.findall(r"\w+", " ".join([*one.files.values(), *one.insertions.values(), *one.commands])))
        assert not words & {Path(path).stem for path in other.files if not path.endswith("/__init__.py")}, one.title


def test_the_tests_of_the_recipes_pass_with_the_rules_of_the_house(python):
    tests = [path for recipe in RECIPES.values() for path in recipe.tests]
    assert len(tests) >= len(RECIPES)
    python.run("-m", "pytest", "-q", "-p", "no:xdist", "lightrft/tests/test_layering.py", *tests)
    written = [path for recipe in RECIPES.values() for path in recipe.files]
    python.run("-m", "flake8", *(path for path in written if path.endswith(".py")))


def test_a_loss(python, tree, home):
    """Also outside of the package, as a plug-in."""
    command, *_ = RECIPES["A loss with an option"].commands
    options, (metrics, ) = train(python, tree, home, command)
    assert options["tanh_width"] == 0.3 and options["policy_loss"] == "tanh_clip"
    assert metrics["policy/optimizer_steps"] == 1 and metrics["policy/grad_norm"] > 0
    outside = shutil.move(tree / "lightrft" / "algorithms" / "losses" / "tanh_clip.py", tree / "tanh_clip.py")
    options, (again, ) = train(python, tree, home, command + " --plugin tanh_clip")
    assert options["tanh_width"] == 0.3 and again["policy/loss"] == metrics["policy/loss"]
    shutil.move(outside, tree / "lightrft" / "algorithms" / "losses" / "tanh_clip.py")


def test_a_loss_of_the_package_breaks_no_test(python):
    _, page, tests = (command.split()[1:] for command in RECIPES["A loss with an option"].commands)
    python.run(*page)
    shown = python.run(*tests, "-p", "no:xdist", "-k", CASES)
    assert int(re.search(r"(\d+) passed", shown)[1]) >= 25


def test_its_option_is_like_any_other(python):
    program = ["-m", "lightrft.cli.train"]
    assert "--tanh_width" in python.run(*program, "--help", "tanh_width")
    code, said = python.call(*program, "--tanh_widht", "1")
    assert code == 2 and "did you mean --tanh_width?" in said
    code, said = python.call(*program, "--tanh_width", "-1")
    assert code == 2 and "--tanh_width -1" in said


def test_an_optimizer(python, tree, home):
    """The file is that which test_conformance trains with as a plug-in of every strategy."""
    recipe, plugin = RECIPES["An optimizer"], ROOT / "lightrft" / "tests" / "support" / "adagrad.py"
    assert plugin.read_text(encoding="utf-8") in recipe.files.values()
    options, (metrics, ) = train(python, tree, home, *recipe.commands)
    assert options["optim"] == "adagrad" and options["adagrad_decay"] == 0.01
    assert metrics["policy/optimizer_steps"] == 1 and metrics["policy/grad_norm"] > 0
    assert "--adagrad_decay" in python.run("-m", "lightrft.cli.train_sft", "--help", "adagrad_decay")


def test_a_reward(python, tree, home):
    _, (metrics, ) = train(python, tree, home, *RECIPES["A reward"].commands)
    key = re.search(r"`(reward/\S+)` is its metric", PAGE.read_text(encoding="utf-8"))[1]
    assert key in metrics and metrics["reward/unscored"] == 0


def test_an_engine(python, tree, home):
    options, (metrics, ) = train(python, tree, home, *RECIPES["An engine"].commands)
    assert options["engine_type"] == "plain" and metrics["rollout/mismatch/abs_logp_mean"] < 1e-5


def test_an_environment(python, tree, home):
    """Behind chats, which take more tokens."""
    sizes = {"prompt_max_len": 64, "generate_max_len": 60, "save_trajectories": True}
    _, (metrics, ) = train(python, tree, home, *RECIPES["An environment"].commands, **sizes)
    samples = runs.read_lines(tree / "out" / "rollouts" / "step_1.jsonl")
    assert any(re.search(r"\[\d+\]", sample["response"]) for sample in samples), samples
    key = re.search(r"`(env/\S+)` is its metric", PAGE.read_text(encoding="utf-8"))[1]
    assert metrics[key] > 0 and not metrics["env/exception"]
    assert metrics["rollout/mismatch/abs_logp_mean"] < 1e-5


def test_a_trainer(python, tree, home):
    options, (metrics, ) = train(python, tree, home, *RECIPES["A trainer"].commands)
    assert options["anchor_coef"] == 0.5 and metrics["sft/loss"] > 0
    words = [sys.executable, "-X", "importtime", "-m", "lightrft.cli.main", "anchored_sft", "--help", "anchor_coef"]
    shown = subprocess.run(words, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, check=True, text=True,
                           timeout=100, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout  # yapf: disable
    assert "--anchor_coef" in shown and not re.search(r"\| +torch$", shown, re.MULTILINE), "--help waits for torch"
