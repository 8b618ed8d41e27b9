"""Every recipe and every preset of a trainer's meanings, as real runs."""
import pytest

from lightrft.config.options import flatten
from lightrft.config.recipes import RECIPES
from lightrft.config.semantics import SEMANTICS
from lightrft.tests import runs
from lightrft.trainer import run_log

SPARE = {"train_batch_size": 4, "max_steps": 2}  # two optimizer steps per rollout: ratios move


@pytest.fixture(name="home", scope="module")
def home_fixture(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_log, "plot_curve", lambda *args: None)
        yield runs.write_home(tmp_path_factory.mktemp("home"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(recipe, home, tmp_path):
    """Parsed, validated, two steps: the options are the recipe's and the weights move."""
    done = runs.run(home, tmp_path, recipe=recipe, **SPARE)
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
