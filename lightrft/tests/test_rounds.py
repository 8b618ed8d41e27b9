"""The loops of ``examples/``: their scripts, their commands in real processes, and calls that are killed."""
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightrft.cli.main import COMMANDS
from lightrft.tests.support import launch, tiny_task
from lightrft.tests.support.runs import read_lines
from lightrft.utils.curve import panels

ROOT = Path(__file__).parents[2]
if not (ROOT / "examples").exists():
    pytest.skip("installed without its repository", allow_module_level=True)
sys.path[:0] = [str(ROOT / "examples")]

import rounds  # noqa: E402

SLOW = tiny_task.REWARD.replace(
    "    letters =", "    import os, time\n"
    "    time.sleep(0.05 * os.path.exists(__file__ + '.waits'))\n    letters =")
GENERATE = "--engine_kv_mib 4"
RECORDER = '#!/bin/sh\nprintf "%s\\0" "$@" > "$WORDS"\n'


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A tiny model, prompts and a reward that can be slow."""
    folder = tiny_task.write_home(tmp_path_factory.mktemp("home"))
    (folder / "slow.py").write_text(SLOW)
    for name, count in (("train", 20), ("test", 4)):
        pq.write_table(pa.Table.from_pylist(tiny_task.rows(count, 50 * (name == "test"))), folder / f"{name}.parquet")
    (folder / "python").write_text(RECORDER)
    (folder / "python").chmod(0o755)
    return folder


class Loop:
    """Calls of the script of an example, as its README.md prints it; its commands run in forked processes."""

    def __init__(self, home, folder, script, patch, **variables):
        self.home, self.out, self.ran, self.logs = home, folder / "out", [], []
        self.words = self.of_script(script, {"OUT": self.out, "MODEL": home / "model", "DATA": home, "PROMPTS": 8,
                                             "N_SAMPLES": 3, "SCORE": home / "slow.py", "GENERATE_MAX_LEN": 8,
                                             "TBS": 4, "SAVE_STEPS": 1, "GENERATE_ARGS": GENERATE,
                                             "EVAL_ARGS": "--engine_kv_mib 4 --accuracy_part compute_score",
                                             **variables})  # yapf: disable
        patch.setattr(rounds, "run", self.run)

    def of_script(self, script, variables):
        """The words that the script gives to the driver; it does not make a model, because it has one."""
        own = {"PYTHON": self.home / "python", "WORDS": self.home / "words", **variables}
        (command, ) = re.findall(r"^bash (\S+)", (ROOT / "examples" / script / "README.md").read_text(), re.MULTILINE)
        subprocess.run(["bash", str(ROOT / command)], check=True,
                       env=os.environ | {name: str(value) for name, value in own.items()})
        script, *words = (self.home / "words").read_text().split("\0")[:-1]
        assert script == "examples/rounds.py"
        return words

    def run(self, words, nproc, lock):
        """A command in a process of its own, which is killed when :attr:`due` is reached."""
        self.ran.append(words)
        self.logs.append(self.out / f"log_{len(self.logs)}")
        run = launch.start(COMMANDS[words[0]][0], words[1:], self.logs[-1])
        while run.processes[0].is_alive():
            if self.due(words):
                run.kill()
            time.sleep(0.01)
        return run.wait()[0]

    def call(self, due=lambda words: False):
        """The command, once; it is killed in a command for which ``due`` comes true."""
        self.due = due
        rounds.main(self.words)

    def count(self, name):
        """Rows of a file of the loop."""
        path = self.out / name
        return path.read_bytes().count(b"\n") if path.exists() else 0


def test_raft_goes_on_in_the_round_that_was_killed(home, tmp_path, monkeypatch, capsys):
    """Killed while it generates, and again while it trains; nothing is generated or learnt twice."""
    loop = Loop(home, tmp_path, "raft", monkeypatch, EPOCHS=4, GENERATE_ARGS=f"{GENERATE} --keep_truncated")
    (home / "slow.py.waits").touch()
    with pytest.raises(SystemExit) as killed:
        loop.call(lambda words: loop.count("round_2/rows.jsonl.parts/rank_00000.jsonl") >= 2)
    (home / "slow.py.waits").unlink()
    done, generated = loop.ran[:], loop.count("round_2/rows.jsonl.parts/rank_00000.jsonl")
    assert killed.value.code == -9 and [words[0] for words in done] == [
        "evaluate", "generate", "sft", "evaluate", "generate"]  # yapf: disable
    with pytest.raises(SystemExit):
        loop.call(lambda words: bool(list((loop.out / "round_2/trained/checkpoints").glob("step_??????"))))
    assert f"resumed: {generated} of 8 rows are done" in loop.logs[5].read_text() and 2 <= generated < 8
    learnt = loop.count("round_2/trained/metrics.jsonl")
    loop.call()
    assert [words[0] for words in loop.ran[5:]] == ["generate", "sft", "sft", "evaluate"]
    assert loop.ran[7] == [*loop.ran[6], "--load_checkpoint"] and learnt < 8
    assert re.search(r"resumed from .* at step [1-7]\b", loop.logs[7].read_text())
    assert [row["step"] for row in read_lines(loop.out / "round_2/trained/metrics.jsonl")] == list(range(1, 9))
    check_raft(loop, capsys.readouterr().out)


def check_raft(loop, printed):
    """What two rounds leave; a further call runs nothing, and one with other settings is refused."""
    ran = len(loop.ran)
    loop.call()
    assert len(loop.ran) == ran and not (loop.out / "round_2/trained/checkpoints").exists()
    asked = [[row["input"] for row in read_lines(loop.out / f"round_{number}/rows.jsonl")] for number in (1, 2)]
    assert [len(each) for each in asked] == [8, 8] and not set(asked[0]) & set(asked[1])
    assert loop.ran[4][loop.ran[4].index("--pretrain") + 1] == str(loop.out / "round_1/trained/hf")
    rows = read_lines(loop.out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2] and all("eval/all/pass@1/low" in row for row in rows)
    assert rows[0]["reward/mean"] > 0 and "reward/mean" not in rows[2]
    assert (loop.out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^\| 2 \|  \| 0\.\d{3} \| 0\.\d{3} \| 0\.\d{3} \|$", printed, re.MULTILINE), printed
    with pytest.raises(SystemExit, match=r"--prompts 9 \(was 8\)"):
        rounds.main([*loop.words, "--prompts", "9"])


RIGHT = {"source": "x", "metric": "pass@1", "value": 0.25, "low": 0.1, "high": 0.5}
GRADED = {"source": "x", "metric": "reward", "value": 0.75, "low": None, "high": None}


def fake(words, nproc, lock):
    """What a command leaves; training needs batches of 4 rows. The reward of "--score graded" defines no accuracy."""
    out = Path(words[words.index("--save_path" if "sft" in words else "--output_path") + 1])
    if words[0] == "sft":
        if words[words.index("--train_batch_size") + 1] != "4":
            return 2
        out = out / "hf" / "README.md"
    elif words[0] == "evaluate":
        out = out / "results.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(GRADED if "graded" in words else RIGHT) + "\n")
    return 0


def test_a_round_that_cannot_train_shows_the_curve_and_takes_other_flags_of_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rounds, "run", fake)
    words = ["--model", "m", "--out", str(tmp_path), "--rounds", "1", "--generate", "", "--evaluate", "", "--train"]
    with pytest.raises(SystemExit) as failed:
        rounds.main([*words, "sft --train_batch_size 32"])
    assert failed.value.code == 2 and "| 0 |  | 0.250 | 0.100 | 0.500 |" in capsys.readouterr().out
    assert len(read_lines(tmp_path / "metrics.jsonl")) == 1 and (tmp_path / "learning_curve.png").exists()
    rounds.main([*words, "sft --train_batch_size 4"])
    told = capsys.readouterr().out
    assert "--train 'sft --train_batch_size 4' (was 'sft --train_batch_size 32')" in told and "| 1 |  | 0.250" in told
    with pytest.raises(SystemExit, match="--prompts 9"):
        rounds.main([*words, "sft --train_batch_size 4", "--prompts", "9"])


def test_a_graded_reward_has_its_mean_in_the_table_and_the_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rounds, "run", fake)
    rounds.main(["--model", "m", "--out", str(tmp_path), "--rounds", "1", "--generate", "", "--evaluate",
                 "--score graded", "--train", "sft --train_batch_size 4"])  # yapf: disable
    assert "| round | sampled reward | held-out reward | from | to |" in (said := capsys.readouterr().out)
    assert "| 0 |  | 0.750 |  |  |" in said and "| 1 |  | 0.750 |  |  |" in said
    assert panels(read_lines(tmp_path / "metrics.jsonl")) == [("held-out reward", {"eval/all/reward": "reward"})]


def test_two_calls_at_once_are_refused(home, tmp_path, monkeypatch):
    loop = Loop(home, tmp_path, "raft", monkeypatch)
    with rounds.locked(loop.out), pytest.raises(SystemExit, match="another call is still running there"):
        loop.call()


def test_iterative_dpo_learns_from_pairs(home, tmp_path, monkeypatch):
    loop = Loop(home, tmp_path, "iterative_dpo", monkeypatch, ROUNDS=1, BETA=0.3)
    loop.call()
    assert {"chosen", "rejected"} < set(read_lines(loop.out / "round_1/rows.jsonl")[0])
    (step, *_) = read_lines(loop.out / "round_1/trained/metrics.jsonl")
    assert loop.ran[2][:2] == ["dpo", "--pretrain"] and step["dpo/loss"] == pytest.approx(0.6931, abs=1e-3)


def test_conditional_sft_asks_for_the_reward_it_has_learnt(home, tmp_path, monkeypatch):
    """The model itself is asked without a wish, those of the rounds with one."""
    loop = Loop(home, tmp_path, "conditional_sft", monkeypatch, ROUNDS=1, WISH="0.90")
    loop.call()
    row = read_lines(loop.out / "round_1/rows.jsonl")[0]
    assert row["input"].endswith(f" <rm_score>: {row['reward']:.2f} ")
    asked = [read_lines(loop.out / f"round_{number}/evaluation/{name}.jsonl")[0]["input"]
             for number, name in ((0, "model"), (1, "hf"))]  # yapf: disable
    assert asked[1] == f"{asked[0]} <rm_score>: 0.90 "
