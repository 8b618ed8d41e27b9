"""Training from a program: keywords are checked as flags are, and the same file runs alone and under torchrun."""
import os
import subprocess
import sys

import pytest

from lightrft import GRPO, RL, SFT
from lightrft.config.options import ConfigError
from lightrft.rewards.workers.pool import LoadError
from lightrft.tests.support import tiny_task
from lightrft.tests.support.launch import ROOT
from lightrft.tests.support.runs import no_picture  # noqa: F401  (a fixture)
from lightrft.utils.errors import UserError

SMALL = {
    "rollout_batch_size": 4, "n_samples_per_prompt": 2, "train_batch_size": 8, "prompt_max_len": 64,
    "generate_max_len": 8, "max_steps": 2, "engine_kv_mib": 1, "self_test": False, "disable_ckpt": True
}  # yapf: disable
PROGRAM = '''
from lightrft import GRPO

def digits(solution_str, ground_truth):
    return float(ground_truth in solution_str)

rows = [{{"prompt": f"What is {{a}}+{{b}}?", "reference": str(a + b)}} for a in range(4) for b in range(4)]
run = GRPO("{model}", rewards=[digits, (lambda completions, **rest: [len(text) for text in completions], 0.1)],
           train_dataset=rows, save_path="{save}", **{options}).train()
print("last", run.metrics["step"].tolist(), round(run.metrics["reward/lambda/mean"].iloc[-1], 6))
'''


@pytest.fixture(name="home", scope="module")
def fixture_home(tmp_path_factory):
    return tiny_task.write_home(tmp_path_factory.mktemp("home"))


def test_keywords_are_checked_as_flags_are(home):
    with pytest.raises(ConfigError) as error:
        GRPO(home / "model", n_samples_per_promt=4, rollout_batch_size="many", algorithm={"gama": 1.0})
    for part in ("did you mean n_samples_per_prompt", "--rollout_batch_size: expected an integer, got 'many'",
                 "algorithm.gama"):
        assert part in str(error.value)
    with pytest.raises(UserError, match="max_len is not an option here"):
        GRPO(home / "model", max_len=4)
    with pytest.raises(UserError, match="pretrain is given by the keyword model already"):
        GRPO(home / "model", pretrain="other")
    with pytest.raises(UserError, match="n_samples_per_prompt"):
        GRPO(home / "model", "exact", tiny_task.rows(4), n_samples_per_prompt=0).plan()


def test_the_plan_shows_where_a_value_comes_from(home):
    plan = RL(home / "model", ["exact", "format=0.1"], tiny_task.rows(4), recipe="dapo", **SMALL).plan()
    assert "keyword" in plan and "recipe dapo" in plan and "format=0.1" in plan and "memory:" in plan


def test_rewards_that_are_none_are_refused(home, tmp_path):
    with pytest.raises(UserError, match="no name, no function"):
        GRPO(home / "model", [3], tiny_task.rows(4))
    with pytest.raises(LoadError, match="known signatures"):
        GRPO(home / "model", lambda text: 1.0, tiny_task.rows(4), save_path=str(tmp_path), **SMALL).train()


def test_equal_names_are_told_apart(home):
    both = GRPO(home / "model", [lambda completions: [0.0], (lambda completions: [1.0], 0.5), "format"])
    assert both.parsed.config.reward.reward == ["lambda=1", "lambda2=0.5", "format"]


def test_a_run_returns_its_metrics_and_its_model(home, tmp_path, no_picture):  # noqa: F811
    """Twice in one process, with a function of this module, on a data set of Hugging Face and on rows."""
    from datasets import Dataset
    calls = [Dataset.from_list(tiny_task.rows(8)), tiny_task.rows(8)]
    runs = [GRPO(home / "model", lambda completions, reference: [len(text) for text in completions], data,
                 tiny_task.rows(3, 20), eval_steps=1, save_path=str(tmp_path / str(i)), **SMALL).train()
            for i, data in enumerate(calls)]  # yapf: disable
    first, second = (run.metrics for run in runs)
    assert first["step"].tolist() == [
        1, 2
    ] and first["reward/lambda/mean"].tolist() == second["reward/lambda/mean"].tolist()
    assert {"eval/all/avg@1", "policy/loss"} <= set(first.columns)
    assert runs[0].model().config.vocab_size == len(runs[0].tokenizer())


def test_supervised_fine_tuning_has_the_same_face(home, tmp_path, no_picture):  # noqa: F811
    rows = [{"messages": [{"role": "user", "content": str(i)}, {"role": "assistant", "content": "yes"}]}
            for i in range(8)]  # yapf: disable
    run = SFT(home / "model", rows, rows[:2], train_batch_size=4, max_steps=2, max_len=64, disable_ckpt=True,
              chat_template="chatml", save_path=str(tmp_path)).train()
    assert run.metrics["sft/loss"].notna().all() and "eval/loss" in run.metrics


def test_rows_in_memory_name_their_content(home, tmp_path):
    specs = [GRPO(home / "model", "exact", tiny_task.rows(count)).parsed.config.data.prompt_data for count in (4, 4, 5)]
    assert specs[0] == specs[1] != specs[2]
    with pytest.raises(UserError, match="rows of a Python program"):
        GRPO(home / "model", "exact", "memory:0", save_path=str(tmp_path), **SMALL).train()


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_file_runs_alone_and_under_torchrun(home, tmp_path, ranks):
    """Its functions are in ``__main__`` and travel to the workers by value."""
    options = SMALL | {"strategy": "auto"}
    (tmp_path / "ten.py").write_text(PROGRAM.format(model=home / "model", save=tmp_path / "run", options=options))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *launcher, "ten.py"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=300, env=environ)  # yapf: disable
    assert done.stdout.count("last [1, 2]") == ranks, done.stderr[-3000:]
