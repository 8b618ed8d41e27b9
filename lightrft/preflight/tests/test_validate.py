import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from lightrft.algorithms import ADVANTAGES
from lightrft.algorithms.base import Advantage
from lightrft.config.evaluate_schema import EvaluateConfig
from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.inference_schema import ChatConfig
from lightrft.config.offline_schema import OfflineConfig
from lightrft.config.options import ConfigError, show
from lightrft.config.preference_schema import DPOConfig, KTOConfig
from lightrft.config.rm_schema import GRMConfig, PRMConfig, RMConfig
from lightrft.config.schema import Config
from lightrft.config.serve_schema import ServeConfig
from lightrft.config.sft_schema import KDConfig, SFTConfig
from lightrft.config.tree import build, options
from lightrft.preflight import engine_rules, paths, shared_rules
from lightrft.preflight.base import preflight
from lightrft.preflight.validate import validate, warnings
from lightrft.tests.support.config_problems import CASES, EVAL, GOOD, KL
from lightrft.tests.support.option_values import every_option
from lightrft.utils.errors import meant_path


@pytest.fixture(autouse=True)
def _every_package_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for rules in (engine_rules, shared_rules):
        monkeypatch.setattr(rules, "find_spec", without("nothing"))


def problems(world_size: int = 2, **values: Any) -> list[str]:
    try:
        validate(build(Config, GOOD | values), world_size)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("values", [
    {},
    {"rollout_batch_size": 16, "n_samples_per_prompt": 5, "train_batch_size": 40},
    KL | {
        "use_kl_loss": True, "kl_target": 0.1, "kl_horizon": 100, "ref_pretrain": "org/ref", "initial_model_shard_size":
        1
    },
    KL | {"kl_estimator": "k1"},
    EVAL
    | {"eval_steps": 2, "eval_at_start": True, "eval_n_samples": 4, "eval_temperature": 1.0, "eval_pass_k": [1, 4]},
    {
        "advantage_estimator": "gae", "critic_pretrain": "org/critic", "freezing_actor_steps": 2,
        "critic_learning_rate": 1e-4, "value_clip": 0.0, "lambd": 0.5, "save_value_network": True,
        "n_samples_per_prompt": 1, "advantages_norm": True
    },
    {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_agg_norm": 100},
    {
        "reward_running_norm": True, "reward_running_norm_minus_mean": True, "overlong_buffer": True,
        "overlong_buffer_len": 100
    },
    {"prompt_data": ["a", "b@dir"], "prompt_data_probs": [0.25, 0.75]},
    {"reward": ["math", "format=0.1", "length=-1e-3"], "remote_rm_url": ["http://localhost:1", "https://x.y/z"]},
    {"lora_rank": 8, "lora_dropout": 0.1, "init_kl_coef": 0.1},
    {"strategy": "fsdp", "fsdp_cpu_offload": True, "fsdp_shard_size": 1},
    {"strategy": "deepspeed", "zero_stage": 3, "zpg": 2, "overlap_comm": True, "adam_offload": True},
    {"input_template": "Q: {}", "max_steps": 5, "save_trajectories": True, "num_trajectories_to_save": 3},
    EVAL | {"best_metric": "eval/all/pass@1", "save_steps": 5},
    {"use_tensorboard": True},
    {"std_eps": 0.1},
    EVAL
    | {"best_metric": "eval/openai/gsm8k/pass@4", "eval_n_samples": 4, "eval_temperature": 1.0, "eval_pass_k": [1, 4]},
])
def test_valid(values: dict[str, Any]) -> None:
    assert problems(**values) == [], "a valid configuration is refused"


@pytest.mark.parametrize("values,parts", CASES)
def test_each_problem_alone(values: dict[str, Any], parts: list[str]) -> None:
    found = problems(**values)
    assert len(found) == 1 and all(part in found[0] for part in parts), found


def test_large_batches_are_checked_quickly() -> None:
    found = problems(rollout_batch_size=10**12 + 1, n_samples_per_prompt=1, advantage_estimator="reinforce",
                     train_batch_size=1000)
    assert "--rollout_batch_size 1000000000000 or" in found[0], found


def test_offload_needs_fsdp() -> None:
    assert problems(1, fsdp_cpu_offload=True) and not problems(1, fsdp_cpu_offload=True, strategy="fsdp")
    assert not problems(1, strategy="single")


def test_deepspeed_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rules, "find_spec", lambda name: None)
    assert problems(strategy="deepspeed") == [shared_rules.NO_DEEPSPEED]
    assert "run: pip install -e '.[deepspeed]'" in shared_rules.NO_DEEPSPEED


def test_paths_that_exist(tmp_path: Path) -> None:
    for name in ("d.parquet", "t.jinja", "r.py"):
        (tmp_path / name).touch()
    found = problems(pretrain=str(tmp_path), prompt_data=[f"{tmp_path}/d.parquet", f"{tmp_path}@sub"],
                     chat_template=f"{tmp_path}/t.jinja", reward=[f"{tmp_path}/r.py:f=0.5"])
    assert found == [], found
    assert "d.parquet: is a file" in problems(save_path=f"{tmp_path}/d.parquet")[0]


@pytest.mark.parametrize("option", ["save_path", "ckpt_path"])
def test_folders_that_cannot_be_written(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file is a file" in problems(**{option: f"{tmp_path}/file/run/1"})[0]
    assert not problems(**{option: f"{tmp_path}/new/run"})
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    assert f"{tmp_path} cannot be written to" in "".join(problems(**{option: f"{tmp_path}/new/run"}))
    assert f"{tmp_path}: cannot be written to" in "".join(problems(**{option: str(tmp_path)}))


def test_all_problems_at_once() -> None:
    found = problems(top_p=2.0, pretrain=None, eval_split="dev", use_kl_loss=True)
    assert len(found) == 4, found
    with pytest.raises(ConfigError, match="4 problems"):
        raise ConfigError(found)


@pytest.mark.parametrize("option,module,install", [
    ("use_wandb", "wandb", "-e '.[wandb]'"),
    ("use_trackio", "trackio", "-e '.[trackio]'"),
    ("use_tensorboard", "tensorboard", "tensorboard"),
    ("use_liger", "liger_kernel", "-e '.[liger]'"),
    ("fused_logprobs", "triton", "triton"),
    ("fused_decode", "triton", "triton"),
])
def test_missing_packages(option: str, module: str, install: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    monkeypatch.setattr("lightrft.preflight.shared_rules.find_spec", without(module))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = problems(**{option: True})
    assert len(found) == 1 and f"--{option}" in found[0] and f"pip install {install}" in found[0], found


def without(module: str) -> Callable[[str], object | None]:
    return lambda name: None if name == module else sys


def test_kernels_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    monkeypatch.setattr("lightrft.preflight.shared_rules.find_spec", without("nothing"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for option in ("use_liger", "fused_logprobs", "fused_decode"):
        assert "need CUDA" in problems(**{option: True})[0]


@pytest.mark.parametrize("tree", [Config, SFTConfig])
def test_every_number_has_a_range_that_holds_its_default(tree: type) -> None:
    for option in every_option(tree):
        assert (option.kind in (int, float)) == bool(option.within), f"{option.flag} needs within= on its line"
        assert not list(option.range_problems(option.default)), "a default is out of range"


@pytest.mark.parametrize("name", [option.name for option in every_option(Config) if option.within])
def test_both_sides_of_every_range(name: str) -> None:
    option = options(Config)[name]
    low = float(option.within[1:].partition(",")[0])
    for value, limited in ((-2, low > -2), (0, low > 0 or option.within.startswith("(0,")),
                           (2**40, not option.within.endswith("inf)"))):  # yapf: disable
        typed = [option.kind(value)] if option.many else option.kind(value)
        assert limited == any(f"--{name} " in text and ": must be " in text for text in problems(**{name: typed}))


@pytest.mark.parametrize("tree", [Config, SFTConfig])
def test_what_a_line_says_about_other_options_is_true(tree: type) -> None:
    known = options(tree)
    readers = {*(known["strategy"].choices or ()), *(options(Config)["engine_type"].choices or ()), "critic"}
    for option in every_option(tree):
        for needed, examples in option.needed.items():
            for example in examples.split("|"):
                assert known[needed].kind is bool or known[needed].convert(example), option.flag
        assert readers.issuperset(option.read_by) and (option.within or not option.why), option.flag


def test_an_algorithm_that_does_not_say_what_it_reads_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, reads in (("silent", None), ("says_so", ("lambd", ))):
        monkeypatch.setitem(ADVANTAGES._entries, name, Advantage(lambda exp, cfg: exp.token_rewards, reads=reads))
    assert problems(advantage_estimator="silent", lambd=0.5, std_eps=0.5) == []
    assert problems(advantage_estimator="says_so", lambd=0.5) == []
    told, = problems(advantage_estimator="says_so", std_eps=0.5)
    assert "--std_eps 0.5: says_so does not use it" in told and "silent" not in told
    assert "use --advantage_estimator gae or says_so" in problems(lambd=0.5)[0]


@pytest.mark.parametrize("loss,values,steps", [
    ("gpg", {"max_epochs": 2}, 16),
    ("gpg", {"rollout_batch_size": 16}, 0),
    ("gpg", {"rollout_batch_size": 16, "max_epochs": 2}, 2),
    ("gpg", {}, 8),
    ("ppo", {"max_epochs": 2}, 0),
])
def test_a_loss_without_a_ratio_is_for_one_step(loss: str, values: dict[str, Any], steps: int) -> None:
    told = list(warnings(build(Config, GOOD | values | {"policy_loss": loss})))
    assert len(told) == (steps > 0) and all(f" {steps} optimizer steps" in text for text in told), told


@pytest.mark.parametrize("values,told", [
    (KL, 0), (KL | {"kl_estimator": "k1"}, 0), (KL | {"kl_estimator": "k2"}, 1), (KL | {"kl_estimator": "k3"}, 1),
    (KL | {"kl_estimator": "k3", "use_kl_loss": True}, 0), (KL | {"use_kl_loss": True}, 0), ({}, 0),
])  # yapf: disable
def test_an_estimator_with_another_gradient_in_the_reward_is_told(values: dict[str, Any], told: int) -> None:
    found = list(warnings(build(Config, GOOD | values)))
    assert len(found) == told and all(f"--kl_estimator {values['kl_estimator']} in" in text for text in found)


@pytest.mark.parametrize("values,part", [
    ({}, ""),
    ({"train_data": []}, "--train_data is missing"),
    ({"train_data": ["no.jsonl"]}, "no such file"),
    ({"train_batch_size": 1}, "2 ranks"),
    ({"eval_split": "dev"}, "--eval_split dev: has no effect without --eval_data"),
    ({"lora_alpha": 64}, "--lora_alpha 64: has no effect without --lora_rank; add --lora_rank 16 or drop"),
    ({"target_modules": ["q_proj"]}, "has no effect without --lora_rank; add --lora_rank 16 or drop --target_modules"),
    ({"learning_rate": -1.0}, "--learning_rate -1"),
    ({"pretrain": None}, "--pretrain is missing"),
    ({"lora_dropout": 0.1}, "--lora_rank"),
    ({"strategy": "single"}, "2 ranks"),
    ({"chat_template": "no.jinja"}, "no such file"),
    ({"best_metric": "eval/loss"}, "--eval_data"),
    ({"best_metric": "reward/mean"}, "sft/"),
])
def test_sft(values: dict[str, Any], part: str) -> None:
    config = build(SFTConfig, {"pretrain": "org/model", "train_data": ["org/data"]} | values)
    if not part:
        validate(config, 2)
        return
    with pytest.raises(ConfigError) as error:
        validate(config, 2)
    assert len(error.value.problems) == 1 and part in error.value.problems[0], error.value.problems


@pytest.mark.parametrize("values,named", [
    ({"top_p": 0.9, "rollout_correction": "tis"}, ["--top_p 0.9"]),
    ({"top_p": 0.9, "top_k": 20, "min_p": 0.1, "rollout_correction": "bypass"}, ["--top_p", "--top_k 20", "--min_p"]),
    ({"top_p": 0.9}, []),
    ({"rollout_correction": "tis"}, []),
])  # yapf: disable
def test_a_correction_by_a_restricted_distribution_is_told(values: dict[str, Any], named: list[str]) -> None:
    found = list(warnings(build(Config, GOOD | values)))
    assert len(found) == len(named) and all(text.startswith(name) for text, name in zip(found, named)), found
    assert all(f"--rollout_correction {values['rollout_correction']}" in text for text in found)


TRAINERS = (Config, SFTConfig, KDConfig, RMConfig, PRMConfig, GRMConfig, DPOConfig, KTOConfig)


@pytest.mark.parametrize("tree", [*TRAINERS, GenerateConfig, EvaluateConfig, ChatConfig, ServeConfig])
def test_a_tree_names_the_class_of_its_checks(tree):
    """Its own, or that of a tree that it derives from."""
    known = get_type_hints(type(preflight(tree())))["config"]
    assert known is tree or tree is RMConfig and known is OfflineConfig


@pytest.mark.parametrize("tree", [GenerateConfig, EvaluateConfig, ChatConfig])
def test_sglang_has_no_repetition_penalty(tree):
    for engine, refused in (("sglang", True), ("vllm", False)):
        found = preflight(build(tree, {"engine_type": engine, "repetition_penalty": 1.2})).engine_problems(1, True, 1)
        said = "--repetition_penalty 1.2: has no effect with --engine_type sglang; add --engine_type vllm or drop it"
        assert (said in list(found)) == refused


@pytest.mark.parametrize("tree", TRAINERS)
def test_every_model_of_a_run_is_looked_for(tree):
    names = [option.name for option in every_option(tree) if option.path == "model"]
    assert "pretrain" in names and all(name.endswith(("pretrain", "_model")) for name in names)
    found = list(preflight(build(tree, dict.fromkeys(names, "/no/such"))).problems(1, False, 1))
    assert {f"--{name} /no/such: no such folder" for name in names} <= {*found}


@pytest.mark.parametrize("tree", [Config, ServeConfig])
def test_a_missing_reward_model_is_named_once(tree):
    found = list(preflight(build(tree, {"reward_pretrain": ["a=./no", "{}"]})).problems(1, False, 1))
    assert found.count("--reward_pretrain ./no: no such folder") == 1
    assert sum("--reward_pretrain {}: names no model" in text for text in found) == 1


def test_what_nothing_reads_is_told() -> None:
    """Names for trackers, sampling of evaluations and the number of checkpoints without any; the head of no critic."""
    for tree, given in ((Config, GOOD), (SFTConfig, {"pretrain": "org/model", "train_data": ["org/data"]})):
        found, = warnings(build(tree, given | {"wandb_run_name": "mine"}))
        assert found.startswith("--wandb_run_name mine: has no effect, because no tracker is selected; add --use_wandb")
        assert not list(warnings(build(tree, given | {"wandb_run_name": "mine", "use_trackio": True})))
        found, = warnings(build(tree, given | {"eval_steps": 2}))
        assert found.startswith("--eval_steps 2: has no effect without --eval_data")
        for name, value in (("save_steps", 5), ("max_ckpt_num", 9), ("max_ckpt_mem", 5.0), ("async_save", False)):
            found, = warnings(build(tree, given | {name: value, "disable_ckpt": True}))
            assert found.startswith(f"--{name} {show(value)}: has no effect with --disable_ckpt"), found
            assert not list(warnings(build(tree, given | {name: value})))
    for name, value in (("eval_n_samples", 4), ("eval_pass_k", [1, 2]), ("value_head_prefix", "v"),
                        ("normalize_reward", True), ("critic_learning_rate", 1e-5)):
        found, = warnings(build(Config, GOOD | {"advantage_estimator": "rloo", name: value}))
        assert found.startswith(f"--{name} {show(value)}: has no effect with"), found
    assert not problems(advantage_estimator="rloo", normalize_reward=True, critic_learning_rate=1e-5)
    found, = warnings(build(Config, GOOD | {"eval_temperature": 0.6}))
    assert found.startswith("--eval_temperature 0.6: has no effect without --eval_data or --eval_suite")
    assert not list(warnings(build(Config, GOOD | {"eval_temperature": 0.6, "eval_data": ["org/data"]})))
    for tree, given, name in ((Config, GOOD | {"eval_data": ["org/data"]}, "eval_top_p"),
                              (EvaluateConfig, {"pretrain": ["org/model"], "eval_data": ["org/data"]}, "top_p")):
        found, = warnings(build(tree, given | {name: 0.9}))
        heat = name.replace("top_p", "temperature")
        assert found.startswith(f"--{name} 0.9: has no effect with --{heat} 0, which is greedy"), found
        assert not list(warnings(build(tree, given | {name: 0.9, heat: 0.6})))


def test_a_mistyped_path_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "mine.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yours.parquet").touch()
    for typed in ("mine.jsn", "./mine.jsn", str(tmp_path / "mine.json"), "./mine.parquet"):
        found, = paths.sources("prompt_data", [typed])
        assert found == f"--prompt_data {typed}: no such file or folder (did you mean mine.jsonl?)"
    assert not list(paths.sources("prompt_data", ["openai/gsm8k", "gsm8k", "mine.jsonl", "org/data.v2"]))
    assert not list(paths.sources("prompt_data", ["org/data@sub/folder"])), "a folder of a data set on the hub"


def test_a_mistyped_path_names_the_one_that_is_there(tmp_path, monkeypatch):
    """In any of its folders, for every kind of path; a name alone stands for one in the same folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first" / "base").mkdir(parents=True)
    (tmp_path / "game.py").touch()
    (tmp_path / "judge.txt").touch()
    said = problems(pretrain="runs/frist/base", ref_pretrain="./runs/first/bse", environment="gmae.py:Game",
                    reward=["gane.py=0.5"], prompt_data=["run/first/base"], judge_template="jugde.txt")
    assert {"--pretrain runs/frist/base: no such folder (did you mean runs/first/base?)",
            "--ref_pretrain ./runs/first/bse: no such folder (did you mean base?)",
            "--environment gmae.py:Game: no such file (did you mean game.py?)",
            "--reward gane.py=0.5: no such file (did you mean game.py?)",
            "--prompt_data run/first/base: no such file or folder (did you mean runs/first/base?)",
            "--judge_template jugde.txt: no such file (did you mean judge.txt?)"} <= {*said}  # yapf: disable
    assert "--environment game.py:Gmae" not in "".join(problems(environment="game.py:Gmae")), "the file tells its names"
    assert meant_path(Path("runs/nowhere/base")) == "" == meant_path(Path("/no/such/x"))


def test_rewards_of_an_environment_need_one(tmp_path):
    (tmp_path / "game.py").write_text("")
    needs = "--reward environment: needs --environment FILE, whose turns have the rewards"
    assert needs in problems(reward=["exact", "environment=0.5"])
    assert needs in problems(reward_recipe=["gsm8k:exact=1+environment=1"])
    assert needs not in problems(reward=["environment"], environment=f"{tmp_path}/game.py")


JUDGE = {"reward": ["judge=0.1"], "judge_url": ["http://host/v1"], "judge_model": "m"}


@pytest.mark.parametrize("values,part", [
    ({}, ""),
    ({"judge_url": []}, "--reward judge: needs --judge_url"),
    ({"judge_model": None}, "--reward judge: needs --judge_model"),
    ({"reward": ["exact"]}, "--judge_url http://host/v1: has no effect without --reward judge"),
    ({"judge_url": ["host/v1"]}, "did you mean http://host/v1?"),
    ({"judge_url": ["http://host/v1/chat/completions"]}, "give the base URL, http://host/v1"),
    ({"judge_score": "score"}, "needs exactly one group"),
    ({"judge_score": "(score"}, "is not a regular expression"),
    ({"judge_key_env": "sk-123"}, "--judge_key_env: expected the name of an environment variable"),
    ({"judge_args": ["stream"]}, "--judge_args stream: expected name=value"),
    ({"judge_template": "/no/such.txt"}, "no such file"),
])  # yapf: disable
def test_the_options_of_a_judge(values: dict[str, Any], part: str) -> None:
    found = problems(**JUDGE | values)
    assert bool(found) == bool(part) and any(part in text for text in found) == bool(part), found
    assert not any("sk-123" in text for text in found), "a key is not shown"
