"""Recipes, meanings and stages between the script and the files: who wins, what is told, what is refused."""
import argparse
from pathlib import Path
from typing import Any

import pytest

from lightrft.config.cli import ParsedConfig, parse_config
from lightrft.config.layers import changed, with_sources
from lightrft.config.options import ConfigError
from lightrft.config.presets import MEANINGS, RECIPES, SEMANTICS
from lightrft.config.schema import AlgorithmConfig, Config
from lightrft.config.tree import flatten, group_from_args, options
from lightrft.preflight.report import recipe_table, resolved, semantics_table
from lightrft.utils.cli_args import add_arguments

ISSUE = ("grpo dapo dr_grpo gspo gmpo cispo cpgd reinforce++ reinforce_baseline rloo remax opo magic ppo").split()


def value_of(parsed: ParsedConfig, name: str) -> tuple[Any, str]:
    return flatten(parsed.config)[name], parsed.provenance[name]


# what the papers say; where one leaves a number open, the one that docs/recipes.md promises
NUMBERS = """
recipe              estimator          loss      low    high   mean                    KL
grpo                group_norm         ppo       0.2    none   seq-mean-token-mean     0.04 k3 loss
dapo                group_norm         ppo       0.2    0.28   token-mean              0 none reward
dr_grpo             dr_grpo            ppo       0.2    none   seq-mean-token-sum-norm 0 none reward
gspo                group_norm         gspo      0.0003 0.0004 seq-mean-token-mean     0 none reward
gmpo                group_norm         gmpo      0.4    0.4    seq-mean-token-mean     0 none reward
cispo               group_norm         cispo     1      4      token-mean              0 none reward
cpgd                cpgd               cpgd      0.2    none   token-mean              0 none reward
reinforce++         reinforce++        ppo       0.2    none   token-mean              0.01 k1 reward
reinforce_baseline  reinforce_baseline ppo       0.2    none   token-mean              0.001 k2 loss
rloo                rloo               reinforce 0.2    none   seq-mean-token-sum      0.01 k1 reward
remax               remax              reinforce 0.2    none   seq-mean-token-sum      0.01 k1 reward
opo                 opo                reinforce 0.2    none   token-mean              0 none reward
magic               group_norm         ppo       0.2    none   token-mean              0 none reward
ppo                 gae                ppo       0.2    none   token-mean              0 none reward
"""
FURTHER = {
    "dapo": "--dynamic_sampling --overlong_buffer --overlong_buffer_len 0 --overlong_buffer_penalty_factor 1",
    "cpgd": "--policy_drift_coef 0.01",
    "opo": "--entropy_coef 0",
    "magic": "--dynamic_sampling --temperature 1 --entropy_target 0.2 --entropy_step 0.0001 --entropy_coef 0 "
    "--entropy_coef_max 0.005",
    "ppo": "--value_clip 0.2 --gamma 1 --lambd 0.95 --advantages_norm",
}


def write(path: Path, text: str) -> list[str]:
    path.write_text(text)
    return ["--config", str(path)]


def test_the_recipes_that_were_asked_for() -> None:
    assert set(RECIPES) == set(ISSUE) == {line.split()[0] for line in NUMBERS.splitlines()[2:]}


@pytest.mark.parametrize("line", NUMBERS.splitlines()[2:])
def test_the_numbers_of_the_papers(line: str) -> None:
    """Independent of the table in the code, and complete: nothing else may differ from the defaults."""
    recipe, estimator, loss, low, high, mean, coef, kind, place = line.split()
    flags = (f"--advantage_estimator {estimator} --policy_loss {loss} --eps_clip {low} --eps_clip_high {high} "
             f"--loss_agg_mode {mean} --init_kl_coef {coef} --kl_estimator {kind} --use_kl_loss {place == 'loss'}")
    expected = flatten(parse_config(f"{flags} {FURTHER.get(recipe, '')}".split()).config)
    assert flatten(parse_config(["--recipe", recipe]).config) == expected | {"recipe": recipe}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_sets_valid_options_and_says_so(recipe: str) -> None:
    parsed = parse_config(["--recipe", recipe])
    known, values = options(Config), flatten(parsed.config)
    for name, value in RECIPES[recipe].options.items():
        assert values[name] == value and parsed.provenance[name] == f"recipe {recipe}"
        assert type(known[name].convert(value)) is type(value), f"{name} {value!r} is not of the option's type"
    others = {n for n, source in parsed.provenance.items() if source == "default"}
    assert others == set(known) - set(RECIPES[recipe].options) - {"recipe"}


def test_dapo_is_the_papers() -> None:
    a = parse_config(["--recipe", "dapo"]).config
    assert (a.algorithm.eps_clip, a.algorithm.eps_clip_high, a.algorithm.loss_agg_mode) == (0.2, 0.28, "token-mean")
    assert a.rollout.dynamic_sampling and a.reward.overlong_buffer and a.algorithm.init_kl_coef == 0


def test_who_wins(tmp_path: Path) -> None:
    script = {"eps_clip": 0.5, "eps_clip_high": 0.6, "loss_agg_mode": "seq-mean-token-sum"}
    yaml = write(tmp_path / "c.yaml", "eps_clip_high: 0.7\n")
    parsed = parse_config(["--recipe", "dapo", "--loss_agg_mode", "seq-mean-token-mean", *yaml], defaults=script)
    assert value_of(parsed, "eps_clip") == (0.2, "recipe dapo"), "a recipe that was asked for beats the script"
    assert value_of(parsed, "eps_clip_high") == (0.7, f"yaml:{tmp_path}/c.yaml; recipe dapo: 0.28")
    assert value_of(parsed, "loss_agg_mode") == ("seq-mean-token-mean", "flag; recipe dapo: token-mean")


def test_flags_win_wherever_the_recipe_was_named(tmp_path: Path) -> None:
    yaml = write(tmp_path / "c.yaml", "algorithm: {recipe: dapo, eps_clip: 0.3}\n")
    parsed = parse_config([*yaml, "--eps_clip_high", "0.4"], defaults={"eps_clip": 0.9})
    assert [value_of(parsed, name)[0] for name in ("eps_clip", "eps_clip_high")] == [0.3, 0.4]
    assert value_of(parsed, "dynamic_sampling") == (True, "recipe dapo")


def test_the_recipe_of_a_script_loses_to_its_other_defaults() -> None:
    script = {"recipe": "dapo", "eps_clip": 0.5}
    parsed = parse_config([], defaults=script)
    assert value_of(parsed, "eps_clip") == (0.5, "script; recipe dapo: 0.2")
    assert value_of(parsed, "eps_clip_high") == (0.28, "recipe dapo")
    assert value_of(parse_config(["--recipe", "gspo"], defaults=script), "eps_clip") == (3e-4, "recipe gspo")
    assert value_of(parse_config(["--recipe", "none"], defaults=script), "eps_clip_high") == (None, "default")


def test_recipes_and_meanings_together() -> None:
    both = parse_config(["--recipe", "grpo", "--semantics", "trl"])
    assert value_of(both, "loss_agg_mode") == ("token-mean", "recipe grpo")
    assert value_of(both, "std_eps") == (1e-4, "semantics trl")
    dr_grpo = parse_config(["--recipe", "dr_grpo", "--semantics", "verl", "--std_eps", "0.5"])
    assert value_of(dr_grpo, "loss_agg_mode") == ("seq-mean-token-sum-norm", "recipe dr_grpo")
    assert value_of(dr_grpo, "loss_agg_norm_seqs") == (True, "default"), "verl divides by sequences too since 0.7.1"
    assert value_of(dr_grpo, "kl_in_outcome") == (True, "semantics verl"), "by the estimator of the recipe"
    assert value_of(dr_grpo, "std_eps") == (0.5, "flag")


@pytest.mark.parametrize("flags,option,value", [
    ("--semantics verl --advantage_estimator gae", "advantages_norm", True),
    ("--semantics verl --advantage_estimator reinforce", "advantages_norm", False),
    ("--semantics verl --recipe rloo", "kl_in_outcome", True),
    ("--semantics verl", "kl_in_outcome", True),
    ("--semantics verl --advantage_estimator remax", "kl_in_outcome", False),
    ("--semantics trl --advantage_estimator rloo", "kl_in_outcome", True),
    ("--semantics trl", "kl_in_outcome", False),
    ("--semantics verl --policy_loss sapo", "loss_agg_mode", "seq-mean-token-mean"),
    ("--semantics trl --policy_loss gmpo", "loss_agg_mode", "token-mean"),
    ("--semantics openrlhf --policy_loss gspo", "loss_agg_mode", "seq-mean-token-mean"),
    ("--semantics lightrft --recipe dapo", "loss_agg_mode", "seq-mean-token-mean"),
    ("--semantics lightrft --advantage_estimator cpgd", "norm_group_std", True),
    ("--semantics verl --advantage_estimator grpo_passk", "norm_group_std", True),
    ("--semantics verl --policy_loss sapo --loss_agg_mode token-mean", "loss_agg_mode", "token-mean"),
])
def test_what_a_meaning_sets_beside_a_choice(flags: str, option: str, value: Any) -> None:
    assert value_of(parse_config(flags.split()), option)[0] == value


def test_the_estimator_of_the_kl_follows_its_place() -> None:
    """k1 in the reward, whose gradient is unbiased there; k3 in the loss."""
    kinds = {
        flags: parse_config(flags.split()).config.algorithm.kl_kind
        for flags in ("--init_kl_coef 0.1", "--init_kl_coef 0.1 --use_kl_loss", "--kl_estimator k2 --use_kl_loss")
    }
    assert list(kinds.values()) == ["k1", "k3", "k2"]
    for name in set(RECIPES) - {"grpo", "reinforce_baseline"}:  # theirs is in the loss
        assert parse_config(["--recipe", name, "--init_kl_coef", "0.1"]).config.algorithm.kl_kind == "k1", name


def test_the_dry_run_shows_it() -> None:
    parsed = parse_config(["--recipe", "dapo", "--eps_clip_high", "0.3"])
    lines = {line.split()[0]: line for line in resolved(parsed.config, parsed.provenance).splitlines()}
    assert lines["eps_clip"].endswith("[recipe dapo]") and lines["eps_clip_high"].endswith("[flag; recipe dapo: 0.28]")
    assert lines["recipe"].endswith("[flag]")


def test_a_stored_run_is_itself_again(tmp_path: Path) -> None:
    from lightrft.config.files import save_config
    first = parse_config(["--recipe", "dapo", "--semantics", "verl", "--eps_clip", "0.1"]).config
    save_config(first, tmp_path / "config.yaml")
    assert parse_config(["--config", str(tmp_path / "config.yaml")]).config == first


def test_a_recipe_that_a_file_outvotes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightrft.config.files import save_config
    save_config(parse_config(["--recipe", "dapo"]).config, tmp_path / "config.yaml")
    with pytest.raises(SystemExit):
        parse_config(["--config", str(tmp_path / "config.yaml"), "--recipe", "gspo"], "prog")
    told = capsys.readouterr().err
    assert f"gspo: has no effect, because every option it sets is also set elsewhere in {tmp_path}" in told, told


@pytest.mark.parametrize("argv,told", [
    ("--recipe grpo --recipe dapo", "--recipe is given twice, grpo and dapo"),
    ("--recipe=grpo --seed 1 --recipe=none", "--recipe is given twice, grpo and none"),
    ("--semantics trl --semantics trl", "--semantics is given twice, trl and trl"),
    ("--stages 8:2,16 --stages 4:1,8", "--stages is given twice, 8:2,16 and 4:1,8"),
])
def test_presets_do_not_add_up(argv: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(argv.split(), "prog")
    assert told in capsys.readouterr().err
    assert parse_config(["--seed", "1", "--seed", "2"]).config.train.seed == 2


@pytest.mark.parametrize("argv,words", [
    (["--recipe", "dappo"], ["--recipe", "did you mean dapo?", "reinforce++"]),
    (["--semantics", "ver"], ["--semantics", "did you mean verl?"]),
])
def test_unknown_presets(argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(argv, "prog")
    told = capsys.readouterr().err
    assert all(word in told for word in words), told


def test_the_help_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--help", "all"], "prog")
    shown = "".join(capsys.readouterr().out.split())
    assert "{" + ",".join(RECIPES) + "}" in shown and "{" + ",".join(SEMANTICS) + "}" in shown


def test_plain_argparse_cannot_have_presets() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    with pytest.raises(ConfigError, match="--recipe dapo: a plain argparse parser.*parse_config"):
        group_from_args(AlgorithmConfig, parser.parse_args(["--recipe", "dapo"]))


@pytest.mark.parametrize(
    "argv", [["--recipe", "ppo", "--advantage_estimator", "rloo"], ["--recipe", "grpo", "--init_kl_coef", "0"],
             ["--recipe", "gmpo", "--policy_loss", "reinforce"], ["--semantics", "verl"]])
def test_what_only_a_preset_set_may_be_without_effect(argv: list[str]) -> None:
    config = parse_config(argv).config
    typed = {word.removeprefix("--") for word in argv if word.startswith("--")}
    found = {name for name, _ in changed(config, set(options(Config)) - typed)}
    assert found == set(), found


def test_a_problem_says_which_preset_it_is_from() -> None:
    parsed = parse_config(["--recipe", "ppo", "--advantage_estimator", "reinforce++"])
    one, bare, two = with_sources(["--advantages_norm true: already", "--advantages_norm: already", "--seed 1: bad"],
                                  parsed.provenance)
    assert one == "--advantages_norm true: already (it is from recipe ppo)" and two == "--seed 1: bad"
    assert bare == "--advantages_norm: already (it is from recipe ppo)"
    sources = {"engine_type": "script", "seed": "yaml:run.yaml", "bf16": "default: no GPU", "top_p": "flag"}
    assert with_sources([f"--{name} x: bad" for name in sources], sources) == [
        "--engine_type x: bad (the script itself sets it as a default, which a flag replaces)",
        "--seed x: bad (it is in run.yaml)", "--bf16 x: bad", "--top_p x: bad"]  # yapf: disable


def test_tables() -> None:
    table = recipe_table().splitlines()
    assert len(table) == 2 + len(RECIPES) and "`--eps_clip_high 0.28`" in table[3]
    meanings = semantics_table().splitlines()
    assert meanings[0].count("|") == 3 + len(SEMANTICS) and len(meanings) == 2 + len(MEANINGS)
    assert all(len(set(line.split("|")[3:-1])) > 1 for line in meanings[2:]), "a row in which all trainers agree"
    changed_by = {
        name for s in SEMANTICS.values()
        for values in (s.options, *s.recipes.values(), *(v for found in s.chosen.values() for v in found.values()))
        for name in values
    }
    assert changed_by - set(MEANINGS) <= {"eps_clip", "eps_clip_high"}, "a difference is missing in the table"
    assert set(MEANINGS) <= changed_by
