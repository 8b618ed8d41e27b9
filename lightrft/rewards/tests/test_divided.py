"""Reward models divided over two ranks."""
import json
import re

import pytest

from lightrft.rewards.base import RewardInput
from lightrft.tests.support import divided_rewards, runs
from lightrft.tests.support.launch import torchrun
from lightrft.tests.support.packages import needs_deepspeed
from lightrft.tests.support.scorers import plain, save_judge


@needs_deepspeed
@pytest.mark.dist
def test_fsdp_and_zero_score_as_whole_models_do(scorers, judge, tmp_path):
    """Each rank holds half of a scalar model, a process reward model and a judge; with another number of responses on
    each rank. A whole run has the metrics of one on one rank with whole models, whose log has the rewards that Hugging
    Face gives."""
    home = runs.write_home(tmp_path)
    paths = [scorers[1], save_judge(tmp_path / "steps", reward_tokens=["+", "-"]), judge]
    torchrun(divided_rewards.__name__, home, tmp_path, json.dumps(paths))
    divided = runs.read_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    done = runs.run(home, tmp_path / "alone", save_trajectories=True, **divided_rewards.options_of(home, paths))
    alone, rows = done.metrics, done.rollout(1)
    said = [re.search(r"user\n(.*?)<\|im_end\|>", row["prompt"], re.S)[1] for row in rows]
    items = [RewardInput("", row["response"], [{"role": "user", "content": text}]) for text, row in zip(said, rows)]
    assert [row["parts"]["rm1"] for row in rows] == pytest.approx(plain(scorers[1], items), rel=1e-4, abs=1e-4)
    names = [name for name in alone if name.startswith("reward/")]
    assert {f"reward/rm{i}/mean" for i in (1, 2, 3)} <= {*names}
    assert {name: divided[name] for name in names} == pytest.approx({name: alone[name] for name in names}, rel=1e-4,
                                                                    abs=1e-6)
