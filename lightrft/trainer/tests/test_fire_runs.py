"""Runs with FIRE sampling: first tokens differ from the trainer and are told apart; evaluation never uses it."""
import pytest

from lightrft.tests.support import runs
from lightrft.trainer.checks.first_step import StepFactError
from lightrft.trainer.tests.test_first_step import with_foreign_engine

no_picture = runs.no_picture

FIRE = {"use_fire": True, "first_token_temperature": 20.0}


@pytest.mark.parametrize("more", [{}, {"max_epochs": 2, "micro_train_batch_size": 2}])
def test_first_tokens_differ_and_the_others_do_not(more, home, tmp_path):
    done = runs.run(home, tmp_path, **FIRE, **more)
    line = done.metrics
    assert line["rollout/mismatch/abs_logp_mean"] > 0.1 > 1e-5 > line["rollout/same_policy/abs_logp_mean"] > 0
    assert line["rollout/same_policy/tokens"] == line["rollout/tokens"] - line["rollout/samples"]
    assert line["policy/first_ratio_gap"] == 0 and "rollout/same_policy/tokens" not in runs.run(home, tmp_path).metrics


def test_an_engine_with_other_weights_is_still_caught(home, tmp_path):
    with pytest.raises(StepFactError, match="rollout/same_policy.*does not sample from the weights"):
        with_foreign_engine(home, tmp_path, **FIRE).fit()


def test_evaluation_and_greedy_baselines_never_use_it(home, tmp_path):
    options = {"eval_data": [str(home / "test.jsonl")], "eval_at_start": True, "eval_steps": 1, "eval_n_samples": 2,
               "eval_temperature": 1.0, "advantage_estimator": "remax"}  # yapf: disable
    usual, fire = (runs.run(home, tmp_path / name, **options, **more) for name, more in (("a", {}), ("b", FIRE)))
    for key in ("eval/all/len", "eval/all/reward@2"):
        assert usual.lines[0][key] == fire.lines[0][key]
    assert usual.lines[1]["reward/greedy_mean"] == fire.lines[1]["reward/greedy_mean"]
    assert usual.lines[1]["reward/mean"] != fire.lines[1]["reward/mean"]
