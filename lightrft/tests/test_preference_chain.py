"""``benchmarks/preference_chain.py``: its commands are valid, its labels of columns are right, and what is recorded
reaches its aims. ``make chain``, which CI calls, runs it."""
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("installed without its repository", allow_module_level=True)
sys.path[:0] = [str(ROOT / "benchmarks")]

import preference_chain as chain  # noqa: E402

from lightrft.cli.offline import OFFLINE  # noqa: E402
from lightrft.config.cli import parse_config  # noqa: E402
from lightrft.config.evaluate_schema import EvaluateConfig  # noqa: E402
from lightrft.config.generate_schema import GenerateConfig  # noqa: E402
from lightrft.config.schema import Config  # noqa: E402

TREES = {"generate": GenerateConfig, "evaluate": EvaluateConfig, "examples/quickstart/train_colocate.py": Config,
         **{name: command.tree for name, command in OFFLINE.items()}}  # yapf: disable


def test_the_commands_are_accepted_and_what_they_train_is_evaluated(tmp_path):
    trained = set()
    for stage in chain.stages(tmp_path, 1):
        if stage.target in TREES:
            values = vars(parse_config(stage.words.split(), tree=TREES[stage.target]).config)
            trained |= {Path(values["checkpoint"].save_path).name} if "checkpoint" in values else set()
        (tmp_path / "raft" / "round_1").mkdir(parents=True, exist_ok=True)
    assert trained - {"rm", "prm", "trained"} == set(chain.NAMES) - {"raft", "iterative_dpo"}
    assert [Path(path).parent.name for path in values["model"].pretrain] == list(chain.NAMES)
    assert chain.GAINS.keys() < chain.NAMES.keys()


def test_its_losses_have_the_flags_of_the_script():
    """So the script, which test_examples trains with one of them, needs no run of the others."""
    script = (ROOT / "examples" / "preferences" / "run_preferences.sh").read_text(encoding="utf-8")
    assert dict(re.findall(r'^  \[(\w+)\]="(.+)"$', script, re.MULTILINE)) == chain.LOSSES


@pytest.mark.parametrize("response, labels", [
    ("<think>7+6+0=13,4+8+1=13</think>\\boxed{133}", [True, True]),
    ("<think>7+6+0=13,4+8+0=12</think>\\boxed{123}", [True, False]),
    ("<think>7+6+0=13,4+8+1=13</think>\\boxed{123}", [True, False]),
    ("<think>7+6+0=12,4+8+1=13</think>\\boxed{132}", [False, False]),
    ("<think>7+6+0=13", [False]), ("<think>7+6+0=13,4+8+1=13,0+0+1=01", [True, True, False]),
])  # yapf: disable
def test_a_column_is_right_if_its_digits_carry_and_sum_are(response, labels):
    steps, found = chain.columns_of(response, "What is 47+86?")
    assert found == labels and ",".join(steps) == response


def test_reward_models_see_no_answer_to_a_held_out_problem(tmp_path):
    """And compare every wrong answer with a right one to the same problem, where there is one."""
    asked = [f"What is {i}+{i}?" for i in range(300)]
    answers = [{"input": each, "output": str(2 * i + wrong), "reward": int(not wrong)} for i, each in enumerate(asked)
               for wrong in (0, 1, 1, i % 3)]  # yapf: disable
    pairs = [{"prompt": each, "chosen": str(2 * i), "rejected": str(2 * i + 1)} for i, each in enumerate(asked)]
    for name, rows in (("answers", answers[:800]), ("varied", answers), ("pairs", pairs[:200])):
        chain.save(tmp_path / f"{name}.jsonl", rows)
    chain.make_rows(tmp_path)
    read = {name: chain.rounds.read(tmp_path / f"{name}.jsonl")
            for name in ("pairs_varied", "pairs_test", "steps_varied", "steps_test")}  # yapf: disable
    trained, tested = ({row["prompt"] for name in read if name.endswith(kind) for row in read[name]}
                       for kind in ("varied", "test"))  # yapf: disable
    assert trained == set(asked) - tested and set(asked[100:200]) <= tested
    assert {row["rejected"] for row in read["pairs_varied"] if row["prompt"] == asked[2]} == {"5", "6"}
    assert all(row["chosen"] == str(2 * int(row["prompt"].split("+")[1][:-1])) for row in read["pairs_varied"])


def test_the_page_shows_the_recorded_runs():
    """And all models reach their aims on every seed."""
    found = json.loads(chain.OUTPUTS.data.read_text(encoding="utf-8"))
    assert chain.section(found) in chain.OUTPUTS.page.read_text(encoding="utf-8")
    assert chain.missed(found) == [] and len(chain.of_run(found, "sft")) == 3
    checked = set(chain.NAMES) - {"sft"} | {"rm", "prm"}
    worse = [row | {"accuracy": 0.4} if row["run"] in checked and row["seed"] == 2 else row for row in found]
    wanted = [chain.NAMES[name] for name in chain.GAINS] + ["reward model", "process reward model"]
    assert [each.split(":")[0] for each in chain.missed(worse)] == wanted
    worse = [row | {"accuracy": 0.4} if row["run"] == "student" else row for row in found]
    assert [each.split(":")[0] for each in chain.missed(worse)] == ["student"]
