"""What is said about options that differ between a checkpoint and the run that resumes from it."""
import pytest

from lightrft.config.schema import Config
from lightrft.config.sft_schema import SFTConfig
from lightrft.config.tree import build, flatten, group_options, groups, options
from lightrft.preflight.validate import changes, lost_length
from lightrft.tests.support.option_values import other_value

SILENT = {"max_steps", "num_episodes", "save_steps", "eval_steps", "eval_data", "logging_steps", "use_wandb",
          "strategy", "micro_train_batch_size", "reward_workers", "save_path"}  # yapf: disable
TOLD = {"seed", "prompt_data", "rollout_batch_size", "n_samples_per_prompt", "train_batch_size", "max_epochs",
        "advantage_estimator", "eps_clip", "init_kl_coef", "actor_learning_rate", "temperature", "generate_max_len",
        "reward", "pretrain", "bf16", "shuffle", "loss_agg_mode", "lr_scheduler", "stages"}  # yapf: disable


@pytest.mark.parametrize("tree", [Config, SFTConfig])
def test_every_option_is_told_or_free(tree):
    told = {name for name, option in options(tree).items()
            if changes(flatten(tree()), build(tree, {name: other_value(option)}))}  # yapf: disable
    assert not told & SILENT and told >= TOLD & options(tree).keys() - ({"max_epochs"} if tree is SFTConfig else set())
    assert changes(flatten(tree()), tree()) == []


def test_the_words():
    saved = flatten(build(Config, {"seed": 1, "prompt_data": ["a", "b"], "max_steps": 5}))
    now = build(Config, {"seed": 2, "prompt_data": ["c"], "max_steps": 6, "dual_clip": 3.0})
    assert changes(saved, now) == ["--prompt_data c (was a,b)", "--dual_clip 3 (was none)", "--seed 2 (was 1)"]
    assert changes({}, now) == [], "an option that the checkpoint does not know"


def test_a_recipe_counts_by_what_it_sets():
    saved, now = flatten(Config()), build(Config, {"recipe": "dapo", "eps_clip_high": 0.28})
    assert changes(saved, now) == ["--eps_clip_high 0.28 (was none)"]


def test_a_group_or_a_line_makes_an_option_free():
    known = options(Config)
    assert known["save_steps"].free and known["eval_data"].free and not known["prompt_data"].free
    assert not group_options(groups(Config)["checkpoint"])["save_steps"].free, "the tree frees its group"


@pytest.mark.parametrize("tree,name", [(Config, "rollout_batch_size"), (SFTConfig, "train_batch_size")])
def test_a_batch_of_another_size_needs_a_number_of_steps(tree, name):
    saved = flatten(build(tree, {name: 4}))
    assert lost_length(saved, build(tree, {name: 4})) is None
    assert lost_length(saved, build(tree, {name: 8, "max_steps": 9})) is None
    told = lost_length(saved, build(tree, {name: 8}))
    assert all(word in told for word in (f"--{name} 8", f"resume with --{name} 4", "--max_steps"))
