"""Every recipe of docs/contributing.md, followed in a copy of the package: its files, its tests, its commands."""
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from lightrft.tests.support import launch, runs, tiny_task

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contributing.md"
if not PAGE.exists():
    pytest.skip("installed without its repository", allow_module_level=True)
pytestmark = pytest.mark.slow
TINY = {name: value for name, value in runs.BASE.items() if name not in ("self_test", "sync_proof", "reward_probe")}
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
        named = re.findall(r"^\*\*`([^`]+)`\*\*\n\n```(python|diff)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        files = {path: text for path, kind, text in named if kind == "python"}
        insertions = {path: text for path, kind, text in named if kind == "diff"}
        commands = re.findall(r"^```bash\n(.*?)\n```", section, re.MULTILINE | re.DOTALL)
        found[title] = Recipe(title, files, insertions, commands)
    return found


RECIPES = recipes()


def environment(tree: Path) -> dict[str, str]:
    """The copy of the package is the one that is imported; its folder is the current one."""
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def run(tree: Path, *words: str | Path) -> str:
    done = subprocess.run([str(word) for word in words], cwd=tree, env=environment(tree), text=True, timeout=250,
                          capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A tiny model, prompts, demonstrations and a reward with spread."""
    home = runs.write_home(tmp_path_factory.mktemp("home"))
    (home / "letters.py").write_text(tiny_task.REWARD, encoding="utf-8")
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(4)]
    (home / "demos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return home


@pytest.fixture
def tree(request, tmp_path):
    """A copy of the package, with the recipe of the test's parameter followed."""
    shutil.copytree(ROOT / "lightrft", tmp_path / "lightrft")
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    RECIPES[request.param].follow(tmp_path)
    return tmp_path


def train(tree: Path, home: Path, command: str) -> tuple[dict, list[dict]]:
    """Run a command of the page in tiny sizes; return its options, flat, and its metrics."""
    files = {"MODEL": home / "model", "DATA": home / "train.jsonl", "DEMOS": home / "demos.jsonl",
             "REWARD": home / "letters.py"}  # yapf: disable
    words = [str(files.get(word, word)) for word in command.split()]
    assert words[0] == "python", command
    sizes = TINY_SFT if "DEMOS" in command else TINY
    run(tree, sys.executable, *words[1:], *launch.flags(sizes | {"save_path": tree / "out"}))
    options = yaml.safe_load((tree / "out" / "config.yaml").read_text(encoding="utf-8"))
    flat = {name: value for group in options.values() if isinstance(group, dict) for name, value in group.items()}
    return flat, runs.read_lines(tree / "out" / "metrics.jsonl")


def checked(tree: Path, title: str) -> None:
    """The tests of a recipe pass, with the rules of the house for its files."""
    recipe = RECIPES[title]
    run(tree, sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "lightrft/tests/test_layering.py", *recipe.tests)
    run(tree, sys.executable, "-m", "flake8", *recipe.files)


def test_the_table_counts_the_files():
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text(encoding="utf-8").splitlines()
             if line.startswith("| [")]  # yapf: disable
    shown = [(cell[0].partition("]")[0][1:], *cell[1:]) for cell in cells]
    assert shown == [recipe.row for recipe in RECIPES.values()]


@pytest.mark.parametrize("tree", ["A loss with an option"], indirect=True)
def test_a_loss(tree, home):
    checked(tree, "A loss with an option")
    options, (metrics, ) = train(tree, home, *RECIPES["A loss with an option"].commands)
    assert options["tanh_width"] == 0.3 and options["policy_loss"] == "tanh_clip"
    assert metrics["policy/optimizer_steps"] == 1 and metrics["policy/grad_norm"] > 0
    shutil.move(tree / "lightrft" / "algorithms" / "losses" / "tanh_clip.py", tree / "tanh_clip.py")
    shutil.rmtree(tree / "out")
    plugin = RECIPES["A loss with an option"].commands[0] + " --plugin tanh_clip"
    options, (again, ) = train(tree, home, plugin)
    assert options["tanh_width"] == 0.3 and again["policy/loss"] == metrics["policy/loss"]


@pytest.mark.parametrize("tree", ["A loss with an option"], indirect=True)
def test_its_option_is_like_any_other(tree, home):
    python = [sys.executable, "-m", "lightrft.cli.train"]
    assert "--tanh_width" in run(tree, *python, "--help", "tanh_width")
    typo = subprocess.run([*python, "--tanh_widht", "1"], cwd=tree, env=environment(tree), text=True, timeout=100,
                          capture_output=True)
    assert typo.returncode == 2 and "did you mean --tanh_width?" in typo.stderr
    wrong = subprocess.run([*python, "--tanh_width", "-1"], cwd=tree, env=environment(tree), text=True, timeout=100,
                           capture_output=True)
    assert wrong.returncode == 2 and "--tanh_width -1" in wrong.stderr


@pytest.mark.parametrize("tree", ["A reward"], indirect=True)
def test_a_reward(tree, home):
    checked(tree, "A reward")
    _, (metrics, ) = train(tree, home, *RECIPES["A reward"].commands)
    key = re.search(r"`(reward/\S+)` is its metric", PAGE.read_text(encoding="utf-8"))[1]
    assert key in metrics and metrics["reward/unscored"] == 0


@pytest.mark.parametrize("tree", ["An engine"], indirect=True)
def test_an_engine(tree, home):
    checked(tree, "An engine")
    options, (metrics, ) = train(tree, home, *RECIPES["An engine"].commands)
    assert options["engine_type"] == "plain" and metrics["rollout/mismatch/abs_logp_mean"] < 1e-5


@pytest.mark.parametrize("tree", ["An environment"], indirect=True)
def test_an_environment(tree, home):
    checked(tree, "An environment")
    _, (metrics, ) = train(tree, home, *RECIPES["An environment"].commands)
    samples = runs.read_lines(tree / "out" / "rollouts" / "step_1.jsonl")
    assert any(re.search(r"\[\d+\]", sample["response"]) for sample in samples), samples
    assert metrics["rollout/mismatch/abs_logp_mean"] < 1e-5


@pytest.mark.parametrize("tree", ["A trainer"], indirect=True)
def test_a_trainer(tree, home):
    checked(tree, "A trainer")
    options, (metrics, ) = train(tree, home, *RECIPES["A trainer"].commands)
    assert options["anchor_coef"] == 0.5 and metrics["sft/loss"] > 0
    shown = run(tree, sys.executable, "-X", "importtime", "-m", "lightrft.cli.main", "anchored_sft", "--help",
                "anchor_coef")
    assert "--anchor_coef" in shown and not re.search(r"\| +torch$", shown, re.MULTILINE), "--help waits for torch"
