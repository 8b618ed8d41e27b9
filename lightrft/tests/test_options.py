"""Every option changes something: a table over the whole tree, from which no option may be missing."""
import ast
import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import lightrft
from lightrft.config.cli import parse_config
from lightrft.config.offline_schema import OfflineConfig, OfflineTrainConfig, PairConfig
from lightrft.config.preference_schema import DPOConfig, KTOConfig
from lightrft.config.rm_schema import PRMConfig, RMConfig
from lightrft.config.schema import Config, LogConfig
from lightrft.config.sft_schema import KDConfig, SFTConfig
from lightrft.config.tree import group_options, options
from lightrft.models.tokenizer import load_tokenizer
from lightrft.preflight.validate import validate
from lightrft.tests.support import preference_runs, runs, tiny
from lightrft.tests.support.offline_flips import (DPO_FLIPS, KD_FLIPS, KTO_FLIPS, PRM_FLIPS, PRM_SHOWN, RM_FLIPS,
                                                  RM_SHOWN, SFT_FLIPS, SFT_SHOWN)
from lightrft.tests.support.option_flips import FLIPS, SHOWN, Flip, Seen, files, forwards, keys, steps, weights
from lightrft.trainer.offline.dpo_trainer import DPOTrainer
from lightrft.trainer.offline.kd_trainer import KDTrainer
from lightrft.trainer.offline.kto_trainer import KTOTrainer
from lightrft.trainer.offline.prm_trainer import PRMTrainer
from lightrft.trainer.offline.rm_trainer import RMTrainer
from lightrft.trainer.offline.sft_trainer import SFTTrainer
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
    turns = [json.dumps({"messages": json.loads(line)["messages"] * 2}) + "\n" for line in lines]
    (folder / "turns.jsonl").write_text("".join(turns), encoding="utf-8")
    preference_runs.write_rows(folder)
    pairs = [{"prompt": text, "chosen": f"{text} is it", "rejected": text * (1 + i % 3) + ".", "other": "?" * i + text,
              "margin": 0.3, "heads": {"short": "chosen"}} for i, text in enumerate(runs.PROMPTS)]  # yapf: disable
    (folder / "scored_pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
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
    return before + str(
        {"run": save, "other": home / "other", "teacher": home / "model"}.get(name, home / f"{name}.jsonl") / rest)


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
    prepare, offload = strategy.prepare, strategy.offload
    strategy.offload = lambda prepared: (seen.calls.append(("offload", )), offload(prepared))
    strategy.prepare = lambda model, optim=None, shard_size=0: (seen.calls.append(
        ("prepare", shard_size)), prepare(model, optim, shard_size))[1]
    return watched(strategy, runs.trainer_of(config, strategy), save, seen)


def run_rows(tree: type, trainer: Any, data: str, home: Path, save: Path, values: dict[str, Any]) -> Seen:
    """A run of a trainer on fixed data, as its command builds it."""
    given = {"pretrain": str(home / "model"), "train_data": [str(home / data)], "save_path": str(save)}
    config = parse_config([], defaults=SFT_BASE | given | values, tree=tree).config
    validate(config, 1)
    seed_everything(config.train.seed)
    strategy = runs.strategy_of(config)
    tokenizer = load_tokenizer(config.model.pretrain, config.data.chat_template)
    rows = trainer.read(config, tokenizer, "train", None)
    held_out = trainer.read(config, tokenizer, "eval", None) if config.data.eval_data else []
    model = partial(trainer.load, config)
    return watched(strategy, trainer(config, strategy, model, tokenizer, rows, held_out), save, Seen(None))


def run_sft(home: Path, save: Path, values: dict[str, Any]) -> Seen:
    """A run of the SFT trainer."""
    return run_rows(SFTConfig, SFTTrainer, "chats.jsonl", home, save, values)


def run_rm(home: Path, save: Path, values: dict[str, Any]) -> Seen:
    """A run of the trainer of reward models."""
    return run_rows(RMConfig, RMTrainer, "scored_pairs.jsonl", home, save, values)


def run_preferences(kind: Any, tree: type, data: str, home: Path, save: Path, values: dict[str, Any]) -> Seen:
    """A run on preferences; moves of models to host memory are counted."""
    trainer = preference_runs.trainer_of(kind, tree, home, save, data, **{"max_steps": 1} | values)
    seen, reload = Seen(None), trainer.strategy.reload
    trainer.strategy.reload = lambda prepared: (seen.calls.append(("reload", )), reload(prepared))
    return watched(trainer.strategy, trainer, save, seen)


def run_dpo(home: Path, save: Path, values: dict[str, Any]) -> Seen:
    """A run of the DPO trainer."""
    return run_preferences(DPOTrainer, DPOConfig, "pairs", home, save, values)


def run_kto(home: Path, save: Path, values: dict[str, Any]) -> Seen:
    """A run of the KTO trainer."""
    return run_preferences(KTOTrainer, KTOConfig, "judged", home, save, values)


def run_kd(home: Path, save: Path, values: dict[str, Any]) -> Seen:
    """A run of the distillation trainer."""
    return run_preferences(KDTrainer, KDConfig, "judged", home, save, {"teacher_model": str(home / "other")} | values)


def run_prm(home: Path, save: Path, values: dict[str, Any]) -> Seen:
    """A run of the trainer of process reward models."""
    tokens = {"placeholder_token": "#", "reward_tokens": ["+", "-"]}
    return run_preferences(PRMTrainer, PRMConfig, "steps", home, save, tokens | values)


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


TABLES: dict[Any, dict[str, Flip]] = {
    run_rl: FLIPS, run_sft: SFT_FLIPS, run_dpo: DPO_FLIPS, run_rm: RM_FLIPS, run_kd: KD_FLIPS, run_prm: PRM_FLIPS,
    run_kto: KTO_FLIPS
}


@pytest.mark.parametrize("run,name", [(run, name) for run, table in TABLES.items() for name in table],
                         ids=lambda value: getattr(value, "__name__", value))
def test_flipping_an_option_changes_something(run, name, observe):
    flip = TABLES[run][name]
    before, after = (flip.watch(observe(run, values)) for values in (flip.base, {**flip.base, name: flip.value}))
    assert before != after, f"--{name} {flip.value} changes nothing that was looked at: {before}"


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
    assert set(options(DPOConfig)) - set(options(PairConfig)) <= set(DPO_FLIPS), "an option of pairs has no flip"
    assert set(group_options(OfflineTrainConfig)) <= own, "the core of offline trainers reads its train group by itself"
    rm, own = set(options(RMConfig)), set(RM_FLIPS) | set(RM_SHOWN)
    assert own <= rm and rm - sft <= own, f"not in the table: {rm - sft - own}"
    assert set(options(KDConfig)) - set(options(SFTConfig)) == set(KD_FLIPS), "an option of distillation has no flip"
    prm, own = set(options(PRMConfig)), set(PRM_FLIPS) | set(PRM_SHOWN)
    assert prm - set(options(OfflineConfig)) <= own <= prm, "an option of process rewards has no flip"
    assert set(options(KTOConfig)) - set(options(OfflineConfig)) <= set(KTO_FLIPS), "an option of KTO has no flip"


@pytest.mark.parametrize("name", [*SHOWN, *SFT_SHOWN, *RM_SHOWN, *PRM_SHOWN])
def test_the_test_that_shows_it_exists(name):
    path, _, test = {**SHOWN, **SFT_SHOWN, **RM_SHOWN, **PRM_SHOWN}[name].partition("::")
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
