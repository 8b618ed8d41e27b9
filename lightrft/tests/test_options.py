"""Every option changes something: a table over the whole tree, from which no option may be missing."""
import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import lightrft
from lightrft.config.cli import parse_config
from lightrft.config.schema import Config, LogConfig
from lightrft.config.sft_schema import SFTConfig, SFTTrainConfig
from lightrft.config.tree import group_options, options
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.models.loader import load_actor, load_tokenizer
from lightrft.preflight.validate import validate
from lightrft.tests.support import runs, tiny
from lightrft.tests.support.option_flips import (FLIPS, SFT_FLIPS, SFT_SHOWN, SHOWN, Flip, Seen, files, forwards, keys,
                                                 steps, weights)
from lightrft.trainer.sft_trainer import SFTTrainer
from lightrft.utils import sinks
from lightrft.utils.env import seed_everything

ROOT = Path(lightrft.__file__).parents[1]
SFT_BASE = {
    "train_batch_size": 4,
    "max_steps": 1,
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "lr_warmup_ratio": 0.0,
    "disable_ckpt": True,
    "max_len": 100,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = runs.write_home(tmp_path_factory.mktemp("home"))
    tiny.save_model(folder / "other", num_hidden_layers=1, initializer_range=0.5, seed=1)
    rows = [[("user", text), ("assistant", text * (1 + i % 3))] for i, text in enumerate(runs.PROMPTS)]
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in row]}) + "\n" for row in rows]
    (folder / "chats.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "gsm8k.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}', encoding="utf-8")
    return folder


def placed(value: Any, home: Path, save: Path) -> Any:
    """``value`` with paths in place of their names."""
    if isinstance(value, list):
        return [placed(item, home, save) for item in value]
    before, at, place = value.partition("@") if isinstance(value, str) else (value, "", "")
    if not at:
        return value
    name, _, rest = place.partition("/")
    return before + str({"run": save, "other": home / "other"}.get(name, home / f"{name}.jsonl") / rest)


def watched(strategy: Any, trainer: Any, save: Path, seen: Seen) -> Seen:
    """Run ``trainer`` to its end, counting."""
    trainer.prepared["actor"].model.register_forward_pre_hook(lambda *_: seen.count())
    trainer.fit()
    seen.run = runs.Run(trainer, save)
    return seen


def run_rl(home: Path, save: Path, values: dict[str, Any]) -> Seen:
    """A run of the RL trainer, with its strategy watched."""
    config = runs.config_of(home, save, **({"save_trajectories": True} | values))
    strategy, seen = runs.strategy_of(config), Seen(None)
    prepare = strategy.prepare
    strategy.prepare = lambda model, optim=None, shard_size=0: (seen.calls.append(
        ("prepare", shard_size)), prepare(model, optim, shard_size))[1]
    return watched(strategy, runs.trainer_of(config, strategy), save, seen)


def run_sft(home: Path, save: Path, values: dict[str, Any]) -> Seen:
    """A run of the SFT trainer, as ``lightrft.cli.train_sft`` builds it."""
    given = {"pretrain": str(home / "model"), "train_data": [str(home / "chats.jsonl")], "save_path": str(save)}
    config = parse_config([], defaults=SFT_BASE | given | values, tree=SFTConfig).config
    validate(config, 1)
    seed_everything(config.train.seed)
    strategy, data = runs.strategy_of(config), config.data.as_data_config()
    tokenizer = load_tokenizer(config.model.pretrain, data.chat_template)
    rows = SFTDataset(data, tokenizer, config.data.max_len)
    held_out = SFTDataset(data, tokenizer, config.data.max_len, "eval") if data.eval_data else []
    with strategy.init_model_context():
        actor = load_actor(config.model)
    return watched(strategy, SFTTrainer(config, strategy, actor, tokenizer, rows, held_out), save, Seen(None))


no_picture = runs.no_picture  # the other tests draw it


@pytest.fixture(scope="module")
def observe(home, tmp_path_factory):
    """``observe(run, options)``; equal runs are made once."""
    made: dict[str, Seen] = {}

    def once(run: Any, values: dict[str, Any]) -> Seen:
        key = f"{run.__name__} {json.dumps(values, sort_keys=True)}"
        if key not in made:
            save = tmp_path_factory.mktemp("run")
            made[key] = run(home, save, {name: placed(value, home, save) for name, value in values.items()})
        return made[key]

    return once


def check(flip: Flip, name: str, run: Any, observe: Any) -> None:
    before, after = (flip.watch(observe(run, values)) for values in (flip.base, {**flip.base, name: flip.value}))
    assert before != after, f"--{name} {flip.value} changes nothing that was looked at: {before}"


@pytest.mark.parametrize("name", list(FLIPS))
def test_flipping_an_option_changes_something(name, observe):
    check(FLIPS[name], name, run_rl, observe)


@pytest.mark.parametrize("name", list(SFT_FLIPS))
def test_flipping_an_option_of_supervised_fine_tuning_changes_something(name, observe):
    check(SFT_FLIPS[name], name, run_sft, observe)


def test_the_same_options_twice_change_nothing(home, tmp_path):
    """Else every flip above would look like a change."""
    left, right = (run_rl(home, tmp_path / name, {"max_steps": 2, "init_kl_coef": 0.1}) for name in "ab")
    for watch in (weights, keys, files, steps, forwards):
        assert watch(left) == watch(right), watch.__name__
    aside = ("time/", "perf/", "rollout/tokens_per_s")
    for first, second in zip(left.run.lines, right.run.lines):
        assert {k: v for k, v in first.items() if not k.startswith(aside)} == {
            k: v for k, v in second.items() if not k.startswith(aside)}  # yapf: disable


@cache
def names_in(path: Path) -> set[str]:
    """The names of the tests in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_no_option_is_missing_from_the_table():
    known = set(options(Config))
    assert known == set(FLIPS) | set(SHOWN), known ^ (set(FLIPS) | set(SHOWN))
    assert not set(FLIPS) & set(SHOWN)
    sft, own = set(options(SFTConfig)), set(SFT_FLIPS) | set(SFT_SHOWN)
    assert own <= sft and sft - own <= known, f"not in any table: {sft - own - known}"
    assert set(group_options(SFTTrainConfig)) <= own, "the SFT trainer reads its train group by itself"


@pytest.mark.parametrize("name", [*SHOWN, *SFT_SHOWN])
def test_the_test_that_shows_it_exists(name):
    path, _, test = {**SHOWN, **SFT_SHOWN}[name].partition("::")
    assert (ROOT / path).is_file() and test in names_in(ROOT / path), f"{name}: there is no {path}::{test}"


def test_the_probe_stops_a_run(home, tmp_path, monkeypatch):
    """Rows whose reference is missing cannot be scored by ``exact``: told before the first step, or not."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in runs.PROMPTS), encoding="utf-8")
    run_rl(home, tmp_path / "off", {"prompt_data": [str(data)], "reward": ["exact"], "reward_probe": False})
    with pytest.raises(ValueError, match="reward"):
        run_rl(home, tmp_path / "on", {"prompt_data": [str(data)], "reward": ["exact"], "reward_probe": True})
    assert not (tmp_path / "on" / "metrics.jsonl").exists()


def test_loading_a_checkpoint_goes_on(home, tmp_path):
    straight = run_rl(home, tmp_path / "straight", {"max_steps": 2})
    for load in (True, False):
        save = tmp_path / str(load)
        run_rl(home, save, {"disable_ckpt": False, "max_steps": 1})
        done = run_rl(home, save, {"disable_ckpt": False, "max_steps": 2, "load_checkpoint": load})
        assert [line["step"] for line in done.run.lines] == [1, 2]
        assert (save / "metrics.1.jsonl").exists() is not load, "a new run moves the old metrics aside"
        assert done.forwards == (1 if load else 2)
    assert all((value == straight.run.weights[name]).all() for name, value in done.run.weights.items())


def test_names_reach_wandb(tmp_path, monkeypatch):
    got = []
    monkeypatch.setattr(sinks, "WandbSink", lambda folder, settings, config: got.append(settings))
    monkeypatch.setattr(sinks, "require", lambda *args: None)
    config = Config(log=LogConfig(use_wandb=True, wandb_project="p", wandb_run_name="r", wandb_group="g",
                                  wandb_org="o"))  # yapf: disable
    made = sinks.MetricSinks.from_config(config, tmp_path, "none")
    with pytest.raises(AttributeError):
        made.log(1, {"a": 1.0})
    assert set(got[0].values()) >= {"p", "r", "g", "o"}
