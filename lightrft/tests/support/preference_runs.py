"""Tiny runs of the trainers on preferences, in this process and under torchrun.

``python -m lightrft.tests.support.preference_runs HOME SAVE`` runs :func:`all_on_ranks` on every rank.
"""
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightrft.cli.offline import OFFLINE
from lightrft.config.cli import parse_config
from lightrft.config.tree import options as known_options
from lightrft.models.tokenizer import load_tokenizer
from lightrft.preflight.validate import validate
from lightrft.tests.support import tiny
from lightrft.tests.support.field import write_longrope
from lightrft.tests.support.launch import torchrun
from lightrft.tests.support.runs import read_lines, strategy_of
from lightrft.utils.env import seed_everything

BASE: dict[str, Any] = {
    "train_batch_size": 8, "max_steps": 3, "learning_rate": 3e-3, "lr_scheduler": "constant", "lr_warmup_ratio": 0.0,
    "max_len": 100, "disable_ckpt": True, "async_save": False, "logging_steps": 1000
}
PAIRS = [{"prompt": f"{a}+{b}?", "chosen": f"{a + b}" + "." * (a % 3), "rejected": "no" * (1 + b)} for a in range(5)
         for b in range(4)]  # yapf: disable
JUDGED = [{"prompt": row["prompt"], "asked": f"{row['prompt']} Now!", "completion": row[side], "instead": "another",
           "label": side == "chosen", "reverse": side != "chosen"} for row in PAIRS for side in ("chosen", "rejected")
          ]  # yapf: disable
STEPS = [{"input": f"{a}+{b}?\n" + "\n".join(step + "#" for step in steps),
          "again": f"Again: {a}+{b}?" + "".join(step + "#" for step in steps),
          "prompt": f"{a}+{b}?\n", "completions": steps, "labels": [label == "+" for label in labels], "label": labels,
          "flipped": ["+-"[label == "+"] for label in labels],
          "graded": [0.2 + 0.4 * (label == "+") for label in labels]}
         for a in range(5) for b in range(4) for steps, labels in [(
             [f"{a}+{b}={a + b + i}" + "." * (a % 3) for i in range(1 + (a + b) % 3)],
             ["-" if i and a % 2 else "+" for i in range(1 + (a + b) % 3)])]]  # yapf: disable
_TIMES = re.compile("time/|perf/")


def write_home(folder: Path) -> Path:
    """Two models (``model``, ``other``) and the rows of all trainers; returns the folder."""
    tiny.save_model(folder / "model", initializer_range=0.3)
    tiny.save_model(folder / "other", num_hidden_layers=1, initializer_range=0.3, seed=1)
    write_rows(folder)
    return folder


def write_rows(folder: Path) -> None:
    """The rows of all trainers."""
    apart = [{name: value for name, value in row.items() if name != "input"} for row in STEPS]
    for name, rows in (("pairs", PAIRS), ("judged", JUDGED), ("steps", STEPS), ("completions", apart)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def trainer_of(kind: Any, tree: type, home: Path, save: Path, data: str, **options: Any) -> Any:
    """The trainer ``kind``, as its command builds it; ``data`` names the file of its rows."""
    paths = {"pretrain": str(home / "model"), "train_data": [str(home / f"{data}.jsonl")], "save_path": str(save)}
    own = {"beta": 0.5} if "beta" in known_options(tree) else {}
    config = parse_config([], defaults=BASE | own | paths | options, tree=tree).config
    validate(config, 1)
    seed_everything(config.train.seed)
    tokenizer = load_tokenizer(config.model.pretrain)
    rows, held_out = (kind.read(config, tokenizer, split, None) if split == "train" or config.data.eval_data else []
                      for split in ("train", "eval"))
    return kind(config, strategy_of(config), partial(kind.load, config), tokenizer, rows, held_out)


@dataclass(frozen=True)
class Rig:
    """Runs of one command on fixed data: its name, the file of its rows and options of every run."""
    command: str
    data: str
    options: dict[str, Any] = field(default_factory=dict)

    def trainer_of(self, home: Path, save: Path, data: str = "", **options: Any) -> Any:
        """A trainer that is ready to fit; ``{home}`` in a value is replaced."""
        command = OFFLINE[self.command]
        own = {name: value.replace("{home}", str(home)) for name, value in self.options.items()}
        return trainer_of(command.trainer_class(), command.tree, home, save, data or self.data, **own | options)

    def run(self, home: Path, save: Path, **options: Any) -> Any:
        """A whole run; returns its trainer."""
        trainer = self.trainer_of(home, save, **options)
        trainer.fit()
        return trainer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and rows of a test module."""
    return write_home(tmp_path_factory.mktemp("home"))


def naive_sums(hf: Any, rows: Sequence[Any]) -> torch.Tensor:
    """Log-probs of the answers by Hugging Face, one sequence at a time."""
    found = []
    for row in rows:
        ids, mask = torch.tensor([row.token_ids]), torch.tensor(row.loss_mask)
        logprobs = hf(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        found.append(logprobs[mask[1:]].double().sum())
    return torch.stack(found)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of every step, without times."""
    return [{key: value for key, value in row.items() if not _TIMES.match(key)}
            for row in read_lines(folder / "metrics.jsonl")]


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the trained model."""
    return load_file(folder / "hf" / "model.safetensors")


def launch(script: str, home: Path, save: Path, data: str, **options: Any) -> None:
    """Run a command on two ranks."""
    values = BASE | options | {"pretrain": home / "model", "train_data": home / f"{data}.jsonl", "save_path": save}
    torchrun(script, *(word for name, value in values.items() for word in (f"--{name}", value)))


EVERY = {
    "sft": ("judged", {}), "kto": ("judged", {"undesirable_loss_weight": 0.5}),
    "dpo": ("pairs", {"loss": "aot", "pretrain": "{home}/qwen3_5"}),
    "grm": ("pairs", {"task_instruction": "{prompt} {first} {second}", "pretrain": "{home}/falcon_h1"}),
    "kd": ("judged", {"teacher_model": "{home}/other", "kd_top_k": 3, "pretrain": "{home}/lfm2"}),
    "prm": ("steps", {"placeholder_token": "#", "reward_tokens": ["+", "-"], "pretrain": "{home}/granitemoehybrid"}),
    "rm": ("pairs", {"pretrain": "{home}/jamba"}),
    "sft of lengths": ("lengths", {"pretrain": "{home}/longrope", "max_len": 200}),
    "sft of states": ("judged", {"pretrain": "{home}/nemotron_h"}),
    "sft of kimi": ("judged", {"pretrain": "{home}/kimi_linear"}),
    "kto of states": ("judged", {"pretrain": "{home}/minimax"}),
    "dpo of states": ("pairs", {"pretrain": "{home}/olmo_hybrid"}),
    "rm of mixtures": ("pairs", {"pretrain": "{home}/qwen3_next"}),
    "rm of states": ("pairs", {"pretrain": "{home}/zamba2"}),
}  # yapf: disable
STATES = ("qwen3_5", "falcon_h1", "lfm2", "granitemoehybrid", "jamba", "nemotron_h", "kimi_linear", "minimax",
          "olmo_hybrid", "qwen3_next", "zamba2")  # models whose layers have state
SPREAD = ["grm", "sft of lengths", "sft of kimi", "kto of states", "dpo of states", "rm of mixtures", "rm of states"]
STRATEGIES: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "zero3": ([*EVERY], {"strategy": "deepspeed", "zero_stage": 3}),
    "zero2": (["sft of lengths"], {"strategy": "deepspeed", "zero_stage": 2}),
    "fsdp": (SPREAD, {"strategy": "fsdp"}),
}  # yapf: disable


def write_lengths(home: Path) -> None:
    """A model whose frequencies change beyond 64 tokens, and rows of which only some are longer."""
    write_longrope(home / "longrope")
    rows = [{"prompt": f"{i}? ", "completion": f"{i:02d} " * (3 + 40 * (i % 4 == 1))} for i in range(24)]
    (home / "lengths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_states(home: Path) -> None:
    """Models whose layers have state."""
    for family in STATES:
        tiny.save_model(home / family, family, initializer_range=0.1)


def run_of(name: str, home: Path, save: Path, **options: Any) -> Any:
    """Run the command with the data and the options of :data:`EVERY`; returns its trainer."""
    data, own = EVERY[name]
    own = {key: value.replace("{home}", str(home)) if isinstance(value, str) else value
           for key, value in own.items()}  # yapf: disable
    return Rig(name.partition(" ")[0], data).run(home, save, eval_steps=0, max_steps=2, **own, **options)


def all_on_ranks(home: Path, save: Path) -> None:
    """Run :data:`STRATEGIES` one after the other."""
    for strategy, (names, options) in STRATEGIES.items():
        for name in names:
            run_of(name, home, save / strategy / name, micro_train_batch_size=2, **options)


def same_steps(one: Path, two: Path, name: str) -> None:
    """Compare loss and gradient of every step: Adam and clipping hide a gradient of another scale from the weights."""
    for a, b in zip(metrics(one), metrics(two), strict=True):
        for key in (f"{name}/loss", f"{name}/grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), key


def close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of weights."""
    assert one.keys() == two.keys()
    return max((one[name] - two[name]).abs().max().item() for name in one)


if __name__ == "__main__":
    all_on_ranks(*map(Path, sys.argv[1:]))
