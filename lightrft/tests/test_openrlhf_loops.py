"""The loops of ``examples/openrlhf``, in OpenRLHF's commands: whole runs, after which answers have a higher reward."""
import os
import re
import subprocess
from pathlib import Path

import pytest

from lightrft.tests.support import tiny
from lightrft.tests.support.runs import read_lines
from lightrft.tests.support.scorers import save_scorer
from lightrft.tests.support.tiny_task import write_rows
from lightrft.tests.support.warm import warm_environ, warm_python

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples" / "openrlhf" / "README.md"
if not PAGE.exists():
    pytest.skip("installed without its repository", allow_module_level=True)


@pytest.fixture(name="home", scope="module")
def home_fixture(tmp_path_factory):
    """A policy that answers with one of eight letters, a random reward model, prompts, and the chats of the policy."""
    home = tmp_path_factory.mktemp("home")
    tiny.save_model(home / "model", initializer_range=0.1)
    save_scorer(home / "rm", seed=1)
    asked = [[{"role": "user", "content": f"{i}?"}] for i in range(64)]
    write_rows(home / "prompts.jsonl", [{"context_messages": turns} for turns in asked])
    write_rows(home / "chats.jsonl", [{"chosen": [*turns, {"role": "assistant", "content": letter}]}
                                      for letter in "abcdefgh" for turns in asked])  # yapf: disable
    words = ["--pretrain", "model", "--train_data", "chats.jsonl", "--input_key", "chosen", "--save_path", "policy",
             "--train_batch_size", "16", "--learning_rate", "0.01", "--max_len", "64", "--disable_ckpt"]
    subprocess.run([warm_python(), "-m", "lightrft.cli.train_sft", *words], check=True, cwd=home,
                   env=os.environ | warm_environ())
    return home


def rewards_of(script, home, out, **variables):
    """Run a script as the page prints it; return the mean reward of each of its readings by the reward model."""
    (command, ) = re.findall(rf"^bash (\S+/{script})", PAGE.read_text(), re.MULTILINE)
    values = {"POLICY": home / "policy", "REWARD_MODEL": home / "rm", "PROMPTS": home / "prompts.jsonl",
              "DATASET": home / "chats.jsonl", "OUT": out, "EVAL_TASK": "generate", "MAX_LEN": 64, "MAX_NEW_TOKENS": 8,
              "ROLLOUT_BATCH_SIZE": 32, "TRAIN_BATCH_SIZE": 8, "TP_SIZE": 1, "TRAINING_ITERS": 2, "N": 8,
              "GENERATE_ARGS": "--engine_kv_mib 4", "LAUNCH": f"{warm_python()} -m", "OMP_NUM_THREADS": 1,
              **variables}  # yapf: disable
    done = subprocess.run(["bash", str(ROOT / command)], capture_output=True, text=True, timeout=280,
                          env=os.environ | warm_environ() | {name: str(value) for name, value in values.items()})
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [row["reward mean"] for row in read_lines(out / "rewards.jsonl")]


@pytest.mark.parametrize("script, variables, gain", [
    pytest.param("rejection_sampling.sh", {"LR": 5e-3, "EPOCHS": 2}, 0.1, marks=pytest.mark.whole),
    pytest.param("iterative_dpo.sh", {"LR": 1e-3, "EPOCHS": 2}, 0.1, marks=pytest.mark.whole),
    pytest.param("conditional_sft.sh", {"LR": 5e-3, "TRAIN_BATCH_SIZE": 32, "WISH": 1.5}, 0.0, marks=pytest.mark.slow),
])  # yapf: disable
def test_the_reward_rises(script, variables, gain, home, tmp_path):
    before, after = rewards_of(script, home, tmp_path, **variables)
    assert after > before + gain
