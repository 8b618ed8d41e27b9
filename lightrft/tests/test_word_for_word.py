"""Commands of the documents of other trainers, word for word but for the name of the program, models and data.

``support/word_for_word.yaml`` has them, ``docs/word_for_word.md`` the outcome of each, which is tried here.
"""
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from lightrft.cli.foreign_module import command_of, DEFAULTS
from lightrft.cli.offline import OFFLINE
from lightrft.config.cli import parse_config
from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.inference_schema import ChatConfig
from lightrft.config.schema import Config
from lightrft.config.serve_schema import ServeConfig
from lightrft.config.tree import flatten
from lightrft.tests.support.launch import free_port
from lightrft.tests.support.runs import read_lines
from lightrft.tests.support.warm import warm_environ, warm_python
from lightrft.tests.support.word_for_word import ON_GPUS, tiny_sizes, without, words_of, write_pictures, write_texts

LISTED = yaml.safe_load((Path(__file__).parent / "support/word_for_word.yaml").read_text(encoding="utf-8"))
COMMANDS = [(document, name) for document, entries in LISTED.items() for name in entries]
PAGE = Path(__file__).parents[2] / "docs" / "word_for_word.md"
if not PAGE.exists():
    pytest.skip("installed without its repository", allow_module_level=True)
ONE_PROCESS = ("serve_rm", "interactive_chat")
SERVERS = [("OpenRLHF, manual", "reward server"), ("OpenRLHF, examples/scripts", "serve_remote_rm.sh")]
ASKS = ("OpenRLHF, manual", "PPO with a remote reward")
MERGES = [("OpenRLHF, README", "merging an adapter"), ("OpenRLHF, examples/scripts", "combine_lora.sh")]
ALONE = [which for which in COMMANDS if which not in (*SERVERS, ASKS, *MERGES)]
TREES = {"train": Config, "generate": GenerateConfig, "chat": ChatConfig, "serve_rm": ServeConfig}
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


def section(document):
    """The part of the page that is about a document."""
    return PAGE.read_text(encoding="utf-8").split(f"\n## {document}\n")[1].split("\n## ")[0]


def with_instead(document, name, words, refused, home, out):
    """The words of a command with those of the page in place of the refused ones."""
    replaced = words_of(LISTED[document][name]["instead"], home, out)
    return [*([] if "--pretrain" in replaced else without(words, refused)), *replaced]


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
    assert row in section(document), row
    if instead:
        again = tried(module, with_instead(document, name, words, outcome.refused, home, tmp_path))
        assert not again.code, again.text


def as_it_runs(document, name, home, port=""):
    """The module and the words of a command for one step on a CPU; it writes below ``out`` of its folder."""
    out = Path("out")
    module, words = split(words_of(LISTED[document][name]["command"], home, out, port))
    if "instead" in LISTED[document][name]:
        row = next(line for line in section(document).splitlines() if line.startswith(f"| {name} |"))
        refused = re.findall(r"`(\w+)`", row.split("; instead ")[0])
        words = with_instead(document, name, words, refused, home, out)
    return module, tiny_sizes(command_of(module), words)


def effect(command, module, words):
    """The options of a command but for where it writes and its names in W&B: what it does."""
    tree = TREES.get(command) or OFFLINE[command].tree
    config = parse_config(words, tree=tree, defaults=DEFAULTS.get(module)).config
    elsewhere = re.compile("save_path|ckpt_path|output_path|wandb_.*|use_tensorboard")
    return command, str({key: value for key, value in flatten(config).items() if not elsewhere.fullmatch(key)})


@pytest.fixture(name="environ", scope="module")
def environ_fixture():
    """The environment of the programs."""
    return os.environ | warm_environ() | {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}


@pytest.fixture(name="ran", scope="module")
def ran_fixture(tmp_path_factory, environ):
    """Return a function that runs a command and returns its folder; commands with the same effect share a run."""
    folders = {}

    def ran(module, words):
        command = command_of(module)
        key = effect(command, module, words)
        if key not in folders:
            folder = tmp_path_factory.mktemp("ran")
            done = subprocess.run([warm_python(), "-m", f"lightrft.cli.{module}", *words], cwd=folder, env=environ,
                                  capture_output=True, text=True, timeout=280, input="2?\nexit\n")
            assert done.returncode == 0, done.stderr[-3000:]
            (folder / "printed").write_text(done.stdout, encoding="utf-8")
            folders[key] = folder
        return folders[key]

    return ran


def check_left(command, folder):
    """Check what a command has left in its folder: a trained model and its step, rows, or an answer."""
    if command == "chat":
        assert (folder / "printed").read_text(encoding="utf-8")
    elif command == "generate":
        [rows] = folder.rglob("*.jsonl")
        assert read_lines(rows)
    else:
        [metrics] = folder.rglob("metrics.jsonl")
        assert any(row["step"] == 1 for row in read_lines(metrics))
        assert (metrics.parent / "hf" / "model.safetensors").exists()


def one_of_each():
    """The first command of each kind; the others take minutes together, and two kinds run in tests of their own."""
    kinds = {"generate", "grm"}
    for document, name in ALONE:
        module, _ = split(shlex.split(LISTED[document][name]["command"]))
        kind = command_of(module)
        yield pytest.param(document, name, marks=[pytest.mark.whole] * (kind in kinds))
        kinds.add(kind)


@pytest.mark.parametrize("document,name", [*one_of_each()])
def test_a_command_of_a_document_runs(document, name, home, ran, request, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "")  # reading the words sets it
    command = LISTED[document][name]["command"]
    if "-VL-" in command:
        request.getfixturevalue("seeing")
    if "generate_vllm" in command:
        pytest.importorskip("vllm")
    module, words = as_it_runs(document, name, home)
    check_left(command_of(module), ran(module, words))


@pytest.mark.whole
def test_the_reward_server_scores_a_run(home, ran, environ, tmp_path, monkeypatch):
    """The servers of both documents are one; a run asks it for its rewards."""
    monkeypatch.setenv("WANDB_API_KEY", "")
    port = free_port()
    module, words = served = as_it_runs(*SERVERS[0], home, port)
    assert effect("serve_rm", *served) == effect("serve_rm", *as_it_runs(*SERVERS[1], home, port))
    log = tmp_path / "log"
    with log.open("w") as file, subprocess.Popen([warm_python(), "-m", f"lightrft.cli.{module}", *words], cwd=tmp_path,
                                                 env=environ, stdout=file, stderr=file) as server:
        try:
            wait_for(port, server, log)
            folder = ran(*as_it_runs(*ASKS, home, port))
        finally:
            server.terminate()
    check_left("train", folder)
    assert read_lines(folder / "out" / "llama3-8b-rlhf" / "metrics.jsonl")[-1]["reward/unscored"] == 0


def wait_for(port, server, log):
    """Wait until a server listens."""
    for _ in range(1200):
        with suppress(OSError), socket.create_connection(("127.0.0.1", int(port))):
            return
        assert server.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"nothing listens on port {port}: {log.read_text()}")


def test_every_command_runs_with_the_words_of_the_page_left_out():
    """Those that merge adapters run where their outcome is tried."""
    assert len(ALONE) + len(SERVERS) + len(MERGES) + 1 == len(COMMANDS)
    left_out = re.search(r"run without the words that need GPUs or vLLM \((.+?)\)", PAGE.read_text(encoding="utf-8"),
                         re.S)
    assert re.findall(r"`--(\w+)`", left_out[1]) == [*ON_GPUS]


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
