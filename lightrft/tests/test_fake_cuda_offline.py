"""Trainers without a rollout, reward models and batch inference on the fake CUDA device: the numbers of the CPU."""
import json
from functools import partial

import pytest

from lightrft.config.preference_schema import DPOConfig, KTOConfig
from lightrft.config.sft_schema import KDConfig
from lightrft.inference.tests import test_generate as inference
from lightrft.tests.support import preference_runs, reward_model_runs as rm, runs, tiny_task
from lightrft.tests.support.fake_cuda import CudaTensor, fake_cuda
from lightrft.tests.support.scorers import save_scorer
from lightrft.tests.test_fake_cuda import assert_same
from lightrft.trainer.offline.dpo_trainer import DPOTrainer
from lightrft.trainer.offline.kd_trainer import KDTrainer
from lightrft.trainer.offline.kto_trainer import KTOTrainer

no_picture = runs.no_picture
CASES = {
    "dpo": (DPOTrainer, DPOConfig, "pairs", {"ref_offload": True}),
    "kto": (KTOTrainer, KTOConfig, "judged", {}),
    "kd": (KDTrainer, KDConfig, "judged", {"kd_top_k": 3, "teacher_offload": True}),
}  # yapf: disable


@pytest.fixture(name="home", scope="module")
def home_fixture(tmp_path_factory):
    """Models and rows of every trainer."""
    home = preference_runs.write_home(tmp_path_factory.mktemp("home"))
    for path, rows in ((home / "pairs", preference_runs.PAIRS), (home / "judged", preference_runs.JUDGED),
                       (home / "model" / "pairs", rm.ROWS)):
        path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]), encoding="utf-8")
    return home


def trained(case, home, save):
    """The trainer of a run with an evaluation."""
    kind, tree, data, options = CASES[case]
    options = options | ({"teacher_model": str(home / "other")} if case == "kd" else {})
    trainer = preference_runs.trainer_of(kind, tree, home, save, data, max_steps=2, train_batch_size=4,
                                         micro_train_batch_size=2, eval_data=[str(home / f"{data}.jsonl")],
                                         eval_steps=2, **options)
    trainer.fit()
    return trainer


def compare(train, tmp_path):
    """Two steps on each device."""
    train(tmp_path / "cpu")
    with fake_cuda():
        trainer = train(tmp_path / "cuda")
        assert all(isinstance(weight.data, CudaTensor) for weight in trainer.actor.model.parameters())
    assert_same(*(preference_runs.metrics(tmp_path / device) for device in ("cuda", "cpu")))


@pytest.mark.parametrize("case", CASES)
def test_a_trainer_on_preferences_gives_the_numbers_of_the_cpu(case, home, tmp_path):
    compare(partial(trained, case, home), tmp_path)


def test_the_training_of_a_reward_model_gives_the_numbers_of_the_cpu(home, tmp_path):

    def train(save):
        trainer = rm.trainer_of(rm.config_of(home / "model", save, max_steps=2, eval_steps=2, train_batch_size=4))
        trainer.fit()
        return trainer

    compare(train, tmp_path)


def test_reward_models_that_visit_the_device_give_the_rewards_of_the_cpu(tmp_path):
    home, scorer = runs.write_home(tmp_path), save_scorer(tmp_path / "scorer", 1)
    options = {
        "reward_pretrain": [scorer], "reward_offload": True, "apply_chat_template": True, "prompt_max_len": 64,
        "reward_probe": False
    }
    expected = runs.run(home, tmp_path / "cpu", **options).lines
    with fake_cuda():
        assert_same(runs.run(home, tmp_path / "cuda", **options).lines, expected)
    assert expected[0]["reward/rm/mean"]


def test_batch_inference_draws_the_tokens_of_the_cpu(tmp_path):
    home = tiny_task.write_home(tmp_path)
    expected = inference.run(home, tmp_path / "cpu").rows
    with fake_cuda():
        assert inference.run(home, tmp_path / "cuda", bf16=False).rows == expected
