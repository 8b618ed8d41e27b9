"""Commands of the documents of other trainers, word for word but for the name of the program, models and data.

``support/word_for_word.yaml`` has them, ``docs/word_for_word.md`` the outcome of each, which is tried here.
"""
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from lightrft.tests.support.word_for_word import words_of, write_pictures, write_texts

LISTED = yaml.safe_load((Path(__file__).parent / "support/word_for_word.yaml").read_text(encoding="utf-8"))
COMMANDS = [(document, name) for document, entries in LISTED.items() for name in entries]
PAGE = Path(__file__).parents[2] / "docs" / "word_for_word.md"
if not PAGE.exists():
    pytest.skip("installed without its repository", allow_module_level=True)
ONE_PROCESS = ("serve_rm", "interactive_chat")
NOTICE = re.compile(
    r"^(?:[\d:]+ (?:WARNING: )?|warning: )(--\w+(?:, --\w+)*).*(?:ha(?:s|ve) no effect|is read as|means|its value is|"
    r"is held out)", re.M)
REFUSED = re.compile(r"^(?:  |lightrft \w+: error: )(?:--)?([\w.]+)(?=.*(?:here: |use |drop|must ))", re.M)


class Outcome(NamedTuple):
    """What a command says: its exit code, the flags with a notice, those that are refused, and the whole message."""
    code: int
    granted: list[str]
    refused: list[str]
    text: str

    def row(self, name: str, instead: str) -> str:
        """Its row in the page."""
        if self.refused:
            words = "every word" if all("." in word for word in self.refused) else _listed(self.refused)
            return f"| {name} | refused, with the remedy | {words}; instead `{' '.join(instead.split())}` |"
        return f"| {name} | runs{', with a notice' * bool(self.granted)} | {_listed(self.granted)} |"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


@pytest.fixture(name="home", scope="module")
def home_fixture(tmp_path_factory):
    """Models and rows of text."""
    return write_texts(tmp_path_factory.mktemp("home"))


@pytest.fixture(name="seeing", scope="module")
def seeing_fixture(home):
    """The same with a model that sees and rows with pictures."""
    pytest.importorskip("torchvision", reason="needs torchvision: make test installs it")
    return write_pictures(home)


@pytest.fixture(name="tried")
def tried_fixture(monkeypatch, capsys):
    """Return a function that plans a command under the name of its module, as ``python -m`` and launchers run it."""
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("WANDB_MODE", "offline")  # the token of the documents is none

    def tried(module, words):
        plan = ["--dry_run", "--plan_gpus", "1xH100" if module in ONE_PROCESS else "8xH100"]
        plan *= module != "lora_combiner"  # it runs
        monkeypatch.setattr(sys, "argv", [module, *words, *plan])
        with pytest.raises(SystemExit) as end:
            runpy.run_module(f"lightrft.cli.{module}", run_name="__main__", alter_sys=True)
        out, err = capsys.readouterr()
        granted = [flag for flags in NOTICE.findall(f"{err}\n{out}") for flag in flags.split(", ")]
        refused = REFUSED.findall(err)
        return Outcome(end.value.code or 0, [*dict.fromkeys(granted)], [*dict.fromkeys(refused)], err)

    return tried


def split(words):
    """Take the words of a launcher off; return the name of the module and its words."""
    at = next(i for i, word in enumerate(words) if re.search(r"\.(cli|trainer)\.|^train_\w+\.py$", word))
    return words[at].removesuffix(".py").rpartition(".")[2], words[at + 1:]


def without(words, refused):
    """Leave out the refused flags, and the words of verl."""
    flag, rest = "", []
    for word in words:
        flag = word.partition("=")[0].lstrip("-") if word.startswith("--") or "=" in word else flag
        rest += [word] if flag not in refused else []
    return rest


@pytest.mark.parametrize("document,name", COMMANDS)
def test_a_command_of_a_document_has_the_outcome_of_the_page(document, name, home, tmp_path, tried, request):
    entry = LISTED[document][name]
    if "-VL-" in entry["command"]:
        request.getfixturevalue("seeing")
    module, words = split(words_of(entry["command"], home, tmp_path))
    outcome, instead = tried(module, words), entry.get("instead", "")
    assert (outcome.code == 2) == bool(outcome.refused) == bool(instead), outcome.text
    problems = int((re.search(r"(\d+) problems", outcome.text) or ["", "1"])[1])
    assert not outcome.refused or len(outcome.refused) == problems, outcome.text
    row = outcome.row(name, instead)
    assert row in PAGE.read_text(encoding="utf-8").split(f"\n## {document}\n")[1].split("\n## ")[0], row
    if instead:
        replaced = words_of(instead, home, tmp_path)
        rest = [] if "--pretrain" in replaced else without(words, outcome.refused)
        again = tried(module, [*rest, *replaced])
        assert not again.code, again.text


def test_the_page_has_no_other_rows():
    rows = re.findall(r"^\| (?!command|---)(.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [name for _, name in COMMANDS]


@pytest.mark.dist
@pytest.mark.slow
def test_the_launcher_of_deepspeed_runs_a_command(home, tmp_path):
    """It passes ``--local_rank``, and names the variables of its ranks in its own way."""
    pytest.importorskip("deepspeed")
    words = words_of(LISTED["OpenRLHF, README"]["SFT"]["command"], home, tmp_path / "run")
    small = ["--max_steps", "1", "--train_batch_size", "2", "--max_len", "64", "--no_use_wandb", "--disable_ckpt"]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1"]
    done = subprocess.run([*launcher, "--module", "lightrft.cli.train_sft", *split(words)[1], *small],
                          capture_output=True, text=True, timeout=280, cwd=tmp_path,
                          env=os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(PAGE.parents[1])})
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "--local_rank has no effect" in said, said[-3000:]
    assert (tmp_path / "run" / "llama3-8b-sft" / "hf" / "model.safetensors").exists()
