"""Every recipe and every preset of a trainer's meanings, as real runs."""
import pytest

from lightrft.config.cli import parse_config
from lightrft.config.options import ConfigError
from lightrft.config.presets import RECIPES, SEMANTICS
from lightrft.config.tree import flatten
from lightrft.tests.support import runs
from lightrft.trainer.session import check
from lightrft.utils.errors import UserError

no_picture = runs.no_picture
SPARE = {"train_batch_size": 4, "max_steps": 2}  # two optimizer steps per rollout: ratios move


@pytest.fixture(name="home", scope="module")
def home_fixture(tmp_path_factory):
    return runs.write_home(tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(recipe, home, tmp_path):
    """Parsed, validated, self-tested, two steps: the options are the recipe's and the weights move."""
    done = runs.run(home, tmp_path, recipe=recipe, self_test=True, **SPARE)
    assert not done.trainer.update.self_test.due, "the self-test found nothing to compare"
    values = flatten(done.trainer.config)
    assert {name: values[name] for name in RECIPES[recipe].options} == RECIPES[recipe].options
    assert [line["step"] for line in done.lines] == [1, 2]
    assert all(0 < line["policy/grad_norm"] < 1e6 for line in done.lines)
    assert ("critic" in done.trainer.prepared) == (recipe == "ppo")
    assert ("policy/kl_coef" in done.metrics) == (RECIPES[recipe].options["init_kl_coef"] > 0)


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("recipe", ["grpo", "dr_grpo", "cispo", "reinforce++"])
def test_recipes_with_the_meanings_of_other_trainers(recipe, semantics, home, tmp_path):
    config = runs.config_of(home, tmp_path, recipe=recipe, semantics=semantics)
    expected = RECIPES[recipe].options | SEMANTICS[semantics].options | SEMANTICS[semantics].recipes.get(recipe, {})
    values = flatten(config)
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize("command,words", [
    ("--recipe ppo --advantage_estimator reinforce++",
     ["--advantages_norm true", "already whitens", "--no_advantages_norm", "it is from recipe ppo"]),
    ("--recipe ppo --advantage_estimator rloo --critic_pretrain org/critic",
     ["--critic_pretrain org/critic", "rloo trains no critic", "--advantage_estimator gae"]),
    ("--recipe grpo --critic_learning_rate 1e-3", ["--critic_learning_rate", "group_norm trains no critic"]),
    ("--recipe grpo --n_samples_per_prompt 1", ["--n_samples_per_prompt 1", "nearest valid value: 2"]),
    ("--recipe dapo --n_samples_per_prompt 1", ["--dynamic_sampling true", "no group has spread", "recipe dapo"]),
    ("--recipe reinforce++ --use_kl_loss", ["--kl_estimator k1", "zero on average", "recipe reinforce++"]),
    ("--recipe rloo --dual_clip 3", ["--dual_clip 3", "reinforce does not use it", "--policy_loss ppo"]),
    ("--recipe dapo --overlong_buffer_len 12", ["--overlong_buffer_len 12", "nearest valid value: 11"]),
    ("--recipe dapo --advantage_estimator maxrl",
     ["--overlong_buffer true", "maxrl divides", "--no_overlong_buffer", "it is from recipe dapo"]),
    ("--recipe dapo --reward_clip 0.0005", ["--zero_spread 0.001", "differ by more than 0.001"]),
    ("--recipe magic --stages 8:2,16 --max_steps 2", ["--max_steps 2", "last stage", "nearest valid value: 3"]),
])
def test_what_contradicts_a_recipe_is_refused_before_anything_starts(command, words, home, tmp_path):
    base = {**runs.BASE, "pretrain": str(home / "model"), "prompt_data": [str(home / "train.jsonl")]}
    base |= {"save_path": str(tmp_path / "run"), "train_batch_size": 4}
    parsed = parse_config(command.split(), "prog", base)
    with pytest.raises(ConfigError) as error:
        check(parsed)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "problems in the configuration" not in message or "n_samples_per_prompt 1" in command, message
    assert not (tmp_path / "run").exists()


def test_a_batch_that_could_never_fill_is_refused_before_the_first_step(home, tmp_path):
    config = runs.config_of(home, tmp_path, recipe="dapo", zero_spread=1.0, reward=["exact"], reward_probe=False)
    with pytest.raises(UserError, match="--zero_spread 1: .* differ by at most 1, .* a little below 1"):
        runs.trainer_of(config, runs.strategy_of(config))


@pytest.mark.parametrize("command,steps", [("--recipe rloo", 0), ("--recipe rloo --train_batch_size 4", 2),
                                           ("--recipe opo --max_epochs 3", 3), ("--policy_loss gpg --max_epochs 2", 2),
                                           ("--recipe rloo --policy_loss ppo --max_epochs 3", 0)])  # yapf: disable
def test_a_loss_without_a_ratio_warns_of_several_steps(command, steps, home, tmp_path, capsys):
    base = {**runs.BASE, "pretrain": str(home / "model"), "prompt_data": [str(home / "train.jsonl")],
            "reward": ["format"]}  # yapf: disable
    with pytest.raises(SystemExit):
        check(parse_config([*command.split(), "--dry_run"], "prog", base))
    message = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(message) == (steps > 0) and all(f"for {steps} optimizer steps" in line for line in message), message


@pytest.mark.parametrize("command", [
    "--recipe ppo --advantage_estimator rloo", "--recipe ppo --advantage_estimator group_norm",
    "--recipe dapo --advantage_estimator maxrl --no_overlong_buffer", "--recipe grpo --init_kl_coef 0",
    "--recipe dapo --no_dynamic_sampling", "--recipe gmpo --policy_loss gspo", "--semantics verl --recipe gspo",
    "--recipe magic --stages 4:1,8 --max_steps 3"
])
def test_flags_may_change_a_recipe(command, home, tmp_path):
    base = {**runs.BASE, "pretrain": str(home / "model"), "prompt_data": [str(home / "train.jsonl")]}
    check(parse_config(command.split(), "prog", base | {"save_path": str(tmp_path / "run")}))
