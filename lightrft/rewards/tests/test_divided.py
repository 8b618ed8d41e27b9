"""Reward models divided over two ranks."""
import json

import pytest

from lightrft.tests.support import divided_rewards, runs
from lightrft.tests.support.launch import torchrun
from lightrft.tests.support.scorers import save_judge


@pytest.mark.dist
def test_fsdp_and_zero_score_as_whole_models_do(scorers, judge, tmp_path):
    """Each rank holds half of a scalar model, a process reward model and a judge; with another number of responses on
    each rank. A whole run has the metrics of one on one rank with whole models."""
    home = runs.write_home(tmp_path)
    paths = [scorers[1], save_judge(tmp_path / "steps", reward_tokens=["+", "-"]), judge]
    torchrun(divided_rewards.__name__, home, tmp_path, json.dumps(paths))
    divided = runs.read_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    alone = runs.run(home, tmp_path / "alone", reward_pretrain=paths, judge_max_len=60, step_reward="mean",
                     generate_max_len=4, eval_data=[str(home / "test.jsonl")], eval_steps=-1).metrics
    names = [name for name in alone if name.startswith("reward/")]
    assert {f"reward/rm{i}/mean" for i in (1, 2, 3)} <= {*names}
    assert {name: divided[name] for name in names} == pytest.approx({name: alone[name] for name in names}, rel=1e-4,
                                                                    abs=1e-6)
