import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrft.config.cli import parse_config
from lightrft.config.compat import ALIASES, GRANTED, REFUSED
from lightrft.config.files import to_yaml
from lightrft.config.options import ConfigError, Option
from lightrft.config.rm_schema import RMConfig
from lightrft.config.evaluate_schema import EvaluateConfig
from lightrft.config.generate_schema import GenerateConfig
from lightrft.config.schema import Config, DataConfig, StrategyConfig, TrainConfig
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.tree import flatten, group_from_args, group_options, groups, options
from lightrft.tests.support.option_values import every_option, other_value, words
from lightrft.utils import launcher
from lightrft.utils.cli_args import add_arguments
from lightrft.utils.env import World

TREES = (Config, SFTConfig, RMConfig, GenerateConfig, EvaluateConfig)
CASES = [
    pytest.param(tree, option, id=f"{tree.__name__}-{option.name}") for tree in TREES for option in every_option(tree)
    if not option.preset
]


# section 2.1 and 2.2 of the original's command line
def fails(capsys: pytest.CaptureFixture[str], argv: list[str], **kwargs: Any) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse_config(argv, "prog", **kwargs)
    assert exit_info.value.code == 2, "errors of the command line exit with 2"
    return capsys.readouterr().err


@pytest.mark.parametrize("tree", TREES)
def test_names_are_unique_and_apart_from_the_refused(tree: type) -> None:
    names = [name for group, cls in groups(tree).items() for name in group_options(cls, group)]
    assert len(names) == len(set(names)), "flag names are shared by two groups"
    assert not set(names) & ({*ALIASES, *GRANTED, "config", "plugin", "dry_run", "help"}), "reserved names"
    assert tree is not Config or not set(names) & set(REFUSED), "an option is refused"


@pytest.mark.parametrize("tree,option", CASES)
def test_every_flag_sets_its_field_and_nothing_else(tree: type, option: Option) -> None:
    value = 4 * option.default if option.name == "rollout_batch_size" else other_value(option)  # not fewer than a batch
    parsed = parse_config(words(option, value), tree=tree)
    changed = {k: v for k, v in flatten(parsed.config).items() if v != options(tree)[k].default}
    single = option.kind is str and option.choices is not None and len(option.choices) == 1
    implied = {"zero_stage": {"strategy": "deepspeed"}, "eval_task": {"engine_type": "vllm"}}.get(option.name, {})
    assert changed == ({} if single else {option.name: value} | implied), f"{option.flag} set {changed}"
    assert parsed.provenance[option.name] == "flag", "provenance"
    assert all(source == "default" for name, source in parsed.provenance.items()
               if name not in {option.name, *implied}), "provenance of the rest"


@pytest.mark.parametrize("argv,strategy,source", [
    (["--zero_stage", "2"], "deepspeed", "--zero_stage"),
    (["--zero_stage", "2", "--fsdp"], "fsdp", "flag"),
    (["--strategy", "auto", "--zero_stage", "3"], "auto", "flag"),
    ([], "auto", "default"),
])
def test_a_written_stage_of_zero_selects_deepspeed(argv: list[str], strategy: str, source: str, tmp_path: Path) -> None:
    for tree in (Config, SFTConfig):
        parsed = parse_config(argv, tree=tree)
        assert (parsed.config.strategy.strategy, parsed.provenance["strategy"]) == (strategy, source)
        (tmp_path / "saved.yaml").write_text(to_yaml(parsed.config))
        again = parse_config(["--config", str(tmp_path / "saved.yaml")], tree=tree)
        assert again.config.strategy.strategy == strategy, "a saved run keeps its own"


@pytest.mark.parametrize("argv, engine, told", [
    (["--eval_task", "generate_vllm"], "vllm", False), ([], "hf", False),
    (["--eval_task", "generate_vllm", "--engine_type", "vllm"], "vllm", False),
    (["--engine_type", "hf", "--eval_task", "generate_vllm"], "hf", True),
    (["--engine_type", "sglang", "--eval_task=generate_vllm"], "sglang", True),
])  # yapf: disable
def test_an_engine_that_is_written_wins_over_that_of_the_task(argv: list[str], engine: str, told: bool,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_config(argv, tree=GenerateConfig).config.as_config().rollout.engine_type == engine
    assert ("--eval_task generate_vllm means --eval_task generate" in capsys.readouterr().err) == told


def test_the_ranks_of_the_launcher_of_deepspeed(monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "environ", {**os.environ})  # so that the names that are added go with the test
    for name in ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)
    monkeypatch.setattr(launcher, "count_cores", lambda: 16)
    before = torch.get_num_threads()
    parse_config(["--local_rank=1", "--seed", "3"])
    assert World.from_env() == World(3, 1, 4, 2)
    assert os.environ["OMP_NUM_THREADS"] == "8" and torch.get_num_threads() == 8, "torch was loaded before"
    os.environ |= {"OMP_NUM_THREADS": "3", "RANK": "0"}
    parse_config(["--seed", "3"])
    assert os.environ.pop("OMP_NUM_THREADS") == "3" and not capsys.readouterr().err, "that of the user"
    parse_config(["--seed", "3"])
    assert "OMP_NUM_THREADS is not set: it is 8, the share of each of the 2 ranks" in capsys.readouterr().err
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [*REFUSED, *GRANTED])
def test_remedies_name_only_real_flags(name: str) -> None:
    for word in (REFUSED | GRANTED)[name].replace(",", " ").replace(";", " ").split():
        if word.startswith("--"):
            assert word[2:] in {*options(Config), "nproc-per-node", "nnodes"}, f"the remedy of --{name} names {word}"


def test_a_wrong_key_of_a_file_hides_none_of_its_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are not missing; of a file that cannot be read nothing else is told."""
    for text, told in (("pretrain: m\nprompt_data: d\nsead: 1", "unknown key sead"), ("pretrain: [", "cannot be read")):
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(SystemExit):
            parse_config(["--config", str(tmp_path / "c.yaml")], further=lambda parsed: parsed.config.missing())
        err = capsys.readouterr().err
        assert told in err and "missing" not in err and "problems" not in err, err


def test_several_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    err = fails(capsys, ["--rolout_batch-size", "4", "--load_in_4bit", "true", "--no_shufle"])
    parts = ("did you mean --rollout_batch_size", "use --bf16", "did you mean --no_shuffle")
    assert all(part in err for part in parts) and err.endswith("\nSee --help for the options.\n"), err


@pytest.mark.parametrize("argv,parts", [
    (["--seed", "x"], ["--seed", "'x'", "an integer"]),
    (["--seed", "1.5"], ["--seed", "'1.5'", "an integer"]),
    (["--l2", "nan"], ["--l2", "'nan'", "a number"]),
    (["--bf16", "maybe"], ["--bf16", "'maybe'", "true or false"]),
    (["--lr_scheduler", "linaer"], ["--lr_scheduler", "'linaer'", "did you mean linear"]),
    (["--eval_pass_k", "1,b"], ["--eval_pass_k", "'b'", "an integer"]),
    (["--eval_data"], ["--eval_data", "at least one value"]),
    (["--roll", "1"], ["--roll"]),
    (["--num_generation", "8"], ["unknown flag --num_generation; num_generations is", "here: --n_samples_per_prompt"]),
    (["stray"], ["'stray'", "--name value"]),
    (["--config", "absent.yaml"], ["absent.yaml", "no such file"]),
    (["--plugin", "no_such_module_here"], ["no_such_module_here", "PYTHONPATH"]),
])
def test_errors_name_flag_value_and_expectation(argv: list[str], parts: list[str],
                                                capsys: pytest.CaptureFixture[str]) -> None:
    err = fails(capsys, argv)
    assert all(part in err for part in parts) and err.startswith("prog: error: "), err


def test_a_secret_given_to_use_wandb_is_not_echoed(capsys: pytest.CaptureFixture[str],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    parsed = parse_config(["--use_wandb", "hunter2"], "prog")
    said = capsys.readouterr().err
    assert "hunter2" not in said + repr(parsed) and "WANDB_API_KEY" in said, said
    assert os.environ["WANDB_API_KEY"] == "hunter2" and parsed.config.log.use_wandb


def test_one_rank_of_a_machine_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert fails(capsys, ["--nonsense"]) == "", "another rank repeats the message"
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "--nonsense" in fails(capsys, ["--nonsense"]), "the second machine may have a fault of its own"


@pytest.mark.parametrize("argv,name,value", [
    (["--prompt_data", "a,b", "c"], "prompt_data", ["a", "b", "c"]),
    (["--stop", "x\\,y", "z"], "stop", ["x,y", "z"]),
    (["--target_modules", "none"], "target_modules", []),
    (["--adam_betas", "0.8,0.9"], "adam_betas", [0.8, 0.9]),
    (["--shuffle", "false"], "shuffle", False),
    (["--no_shuffle"], "shuffle", False),
    (["--no_shuffle", "--shuffle"], "shuffle", True),
    (["--kl_target", "0.1", "--kl_target", "none"], "kl_target", None),
    (["--max_samples", "1e6"], "max_samples", 1000000),
    (["--eval_steps", "-1"], "eval_steps", -1),
    (["--wandb_project=a b"], "wandb_project", "a b"),
])
def test_forms_of_a_value(argv: list[str], name: str, value: Any) -> None:
    assert flatten(parse_config(argv).config)[name] == value, f"{argv} should set {name} to {value}"


def test_precedence_and_provenance(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("train: {seed: 1, l2: 0.1, max_norm: 2}\n")
    second.write_text("l2: 0.2\nmax_norm: 3\n")
    argv = ["--config", str(first), "--config", str(second), "--max_norm", "4"]
    parsed = parse_config(argv, defaults={"seed": 9, "l2": 9, "gamma": "0.9"})
    assert vars(
        parsed.config.train)["seed"] == 1 and parsed.config.train.l2 == 0.2 and parsed.config.train.max_norm == 4.0
    found = {name: parsed.provenance[name] for name in ("seed", "l2", "max_norm", "gamma", "lambd")}
    assert found == {
        "seed": f"yaml:{first}", "l2": f"yaml:{second}", "max_norm": "flag", "gamma": "script", "lambd": "default"
    }, found
    assert parsed.config.algorithm.gamma == 0.9, "script defaults are converted"


def test_a_rollout_smaller_than_a_batch_is_one_batch() -> None:
    small = ["--rollout_batch_size", "4", "--n_samples_per_prompt", "8"]
    parsed = parse_config(small)
    assert parsed.config.train.train_batch_size == 32
    assert parsed.provenance["train_batch_size"] == "samples of a rollout"
    assert parse_config([*small, "--train_batch_size", "16"]).config.train.train_batch_size == 16
    assert parse_config(["--rollout_batch_size", "64", "--n_samples_per_prompt",
                         "8"]).config.train.train_batch_size == 128


def test_a_list_that_is_given_twice_is_the_last_one(capsys: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """So that ``"$@"`` behind the words of a script replaces them; where that loses something, a warning has both."""
    for argv, told in ((["--reward", "a", "b", "--reward",
                         "c"], "--reward is given twice: c counts, and a,b is dropped;"
                        " both: --reward a,b,c\n"), (["--reward", "c", "--reward", "c"], ""), (["--reward", "c"], "")):
        assert parse_config(argv).config.reward.reward == ["c"]
        said = capsys.readouterr().err
        assert told in said and bool(told) is bool(said), said
    parser = add_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--reward", "a"]).reward == ["a"] and not capsys.readouterr().err
    assert parser.parse_args(["--reward", "a", "--reward", "c"]).reward == ["c"]
    assert "is given twice" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    parse_config(["--reward", "a", "--reward", "c"])
    assert not capsys.readouterr().err


def test_wrong_script_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean seed" in fails(capsys, [], defaults={"sed": 1})


def test_help_lists_every_option_by_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse_config(["--help", "all"], "prog", {"seed": 4321}, "What it does.")
    shown = capsys.readouterr().out
    assert exit_info.value.code == 0 and "What it does." in shown, "help"
    assert all(f"--{name}" in shown for name in options(Config)) and all(f"\n{group}:" in shown
                                                                         for group in groups(Config))
    assert "default: 4321" in " ".join(shown.split()) and "--use_mp_opt" not in shown, "defaults are the script's"


def help_of(capsys: pytest.CaptureFixture[str], *words: str, **kwargs: Any) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse_config(list(words), "prog", **kwargs)
    assert exit_info.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("tree", TREES)
def test_the_short_help_has_what_most_people_set(tree: type, capsys: pytest.CaptureFixture[str]) -> None:
    known = options(tree)
    common = [name for name, option in known.items() if option.common]
    counted = next(name for name in common if known[name].kind is int)
    shown = help_of(capsys, "--help", tree=tree, defaults={counted: 4321})
    written = {"save_path", "train_batch_size"} if "train_batch_size" in known else {"output_path"}
    assert 12 <= len(common) <= 25 and {"pretrain", *written} <= set(common)
    assert re.findall(r"^  --(\w+)", shown, re.MULTILINE) == ["config", "plugin", "dry_run", "plan_gpus", *common]
    assert f"{len(known) - len(common)} further options: --help all" in shown and "(default: 4321)" in shown


def test_the_help_of_a_group_and_of_one_option(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(capsys, "-h", "rollout")
    assert re.findall(r"^  --(\w+)", shown, re.MULTILINE)[4:] == list(group_options(groups(Config)["rollout"]))
    assert "further options" not in shown and "\nmodel:" not in shown
    one = help_of(capsys, "--help", "kl-horizon", defaults={"kl_horizon": 77})
    assert one.startswith("--kl_horizon int\n  samples over which") and "--rollout" not in one
    assert all(re.search(fact, one) for fact in ("default +77", "range +at least 1", "needs +--kl_target 0.1"))
    assert re.search("off +--no_engine_sleep", help_of(capsys, "--help", "engine_sleep"))


@pytest.mark.parametrize("word", ["pictures", "video", "media", "Tower"])
def test_the_help_of_a_word(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.findall(r"^  --(\w+)", help_of(capsys, "--help", word), re.MULTILINE)[4:]
    assert {"Tower": "cache_features", "media": "media_root"}.get(word, "fps") in found and "eps_clip" not in found


@pytest.mark.parametrize("what,said", [
    ("rolout", "prog: error: --help rolout: no such option or group (did you mean rollout?); --help all"),
    ("epsclip", "(did you mean eps_clip?)"),
    ("al", "(did you mean all?)"),
    ("save_strategy", "save_strategy is an option of another trainer; here: --save_steps"),
    ("num_generations", "num_generations is an option of another trainer; here: --n_samples_per_prompt"),
    ("use_gspo", "use --policy_loss gspo"),
])
def test_help_on_nothing_that_there_is(what: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(capsys, ["--help", what])
    assert said in error and "missing" not in error, "what a run would need"


def test_the_help_of_a_word_of_another_trainer_that_options_here_have_too(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(capsys, "--help", "lora")
    assert shown.startswith("lora is an option of another trainer; here: --lora_rank")
    assert {"lora_rank", "lora_alpha", "lora_sync"} <= set(re.findall(r"^  --(\w+)", shown, re.MULTILINE))


def test_plugins_are_imported_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_part_a.py").write_text("import sys\nsys.flags_seen = True\n")
    (tmp_path / "c.yaml").write_text("plugin: [my_part_a]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert parse_config(["--config", "c.yaml", "--plugin", "my_part_a"]).plugins == ["my_part_a"]
    assert "my_part_a" in sys.modules


def test_a_plugin_that_misses_a_package_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_part_b.py").write_text("import no_such_package_here\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit):
        parse_config(["--plugin", "my_part_b"])
    assert "my_part_b.py:1: ModuleNotFoundError: No module named 'no_such_package_here'" in capsys.readouterr().err


def test_plain_argparse() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mine", default=3)
    parser.add_argument("--seed", default="5")
    parser.add_argument("--text_only", action="store_true")
    args = add_arguments(parser).parse_args(["--fsdp", "--prompt_data", "a,b", "--text_only", "--no_shuffle"])
    assert StrategyConfig.from_args(args) == StrategyConfig(strategy="fsdp") and args.mine == 3 and args.text_only
    data = group_from_args(DataConfig, args)
    assert data.prompt_data == ["a", "b"] and not data.shuffle and group_from_args(TrainConfig, args).seed == 5
    for group, cls in groups(Config).items():
        assert group == "train" or group_from_args(cls,
                                                   add_arguments(argparse.ArgumentParser()).parse_args([])) == cls()


def test_plain_argparse_refuses_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        add_arguments(argparse.ArgumentParser()).parse_args(["--sp_size", "2"])
    assert REFUSED["sp_size"] in capsys.readouterr().err


def test_partial_namespace() -> None:
    assert StrategyConfig.from_args(argparse.Namespace(fsdp=True, seed=1)) == StrategyConfig(strategy="fsdp")
    assert group_from_args(DataConfig, argparse.Namespace(prompt_data=None,
                                                          eval_data="a,b")) == DataConfig(eval_data=["a", "b"])
    with pytest.raises(ConfigError, match="--fsdp_shard_size: expected an integer, got 'x'"):
        StrategyConfig.from_args(argparse.Namespace(fsdp_shard_size="x"))


def test_exit_code_of_a_real_process() -> None:
    code = "from lightrft.config.cli import parse_config; parse_config()"
    done = subprocess.run([sys.executable, "-c", code, "--sede", "1"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "did you mean --seed" in done.stderr and "Traceback" not in done.stderr, done.stderr
