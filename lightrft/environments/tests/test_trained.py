"""Two steps of training with each environment of another trainer: every reward and metric is what the turns that were
drawn earn by the rules of that environment."""
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightrft.config.schema import DataConfig
from lightrft.datasets.sft_dataset import SFTDataset
from lightrft.environments.pool import EnvironmentPool
from lightrft.tests.support import foreign_environments as foreign, runs, tool_models
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer, trainer_arguments
from lightrft.utils.play import FAILURES
from lightrft.utils.timer import Timer

no_picture = runs.no_picture
ROOT, ORACLES = Path(__file__).parents[3], Path(sys.prefix) / "oracles"  # what `make oracles` installs
SUPPORT = Path(foreign.__file__).parent
TURNS = 4  # --max_turns
ANSWER = "\\boxed{3}"
ROW = {"prompt": [{"role": "user", "content": "sum"}], "reference": "3", "difficulty": 2,
       "extra_info": {"interaction_kwargs": {"ground_truth": "3"}, "env_config": {"start": "3"},
                      "tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "3"}}}}}  # yapf: disable


def calls(name: str, *arguments: dict[str, Any]) -> list[list[str]]:
    """Turns that call a tool, as tokens."""
    return [["<tool_call>", json.dumps({"name": name, "arguments": each}), "</tool_call>"] for each in arguments]


OPTIONS = {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "max_steps": 2,
           "prompt_max_len": 700, "generate_max_len": 600, "stop": [], "save_trajectories": True}  # yapf: disable


class Earned(NamedTuple):
    """What the turns of a response earn: its reward, and its own metrics."""
    reward: float
    metrics: dict[str, float] = {}


Rule = Callable[[Sequence[str], int], Earned]
COUNT = calls("increment", {"step": 1}, {"step": 2})
CHECK = calls("check", {"answer": "3"}, {"answer": "4"})


def doubled(turns, seed):
    called = sum("double" in turn for turn in turns)
    return Earned(turns[-1] == ANSWER, {"wrong_calls": 0, "calls": called})


def counted(turns, seed):
    steps = [json.loads(turn[len("<tool_call>"):-len("</tool_call>")])["arguments"]["step"]
             for turn in turns if turn != "done"]  # yapf: disable
    return Earned(sum(steps), {"wrong_calls": 0, "calls": len(steps)})


def checked(turns, seed):
    made = [turn for turn in turns if turn != "done"]
    return Earned(1 + 0.25 * sum('"3"' in turn for turn in made),
                  {"wrong_calls": 0, "calls": len(made), "checked": len(made)})  # yapf: disable


def tried(turns, seed):
    return Earned("3" in turns, {"tries": len(turns)})


def solved(turns, seed):
    return Earned(sum({"#### 3": 1.0, "#### 4": 0.2 / TURNS, "4": 0.0}[turn] for turn in turns), {"steps": len(turns)})


def guessed(turns, seed):
    """The game itself, as its package plays it."""
    game = foreign.Guess()
    game.reset(num_players=1, seed=seed)
    for turn in turns:
        game.get_observation()
        game.step(action=turn)
    return Earned((game.close()[0] or {}).get(0, 0.0))


def crossed(turns, seed):
    """The way around the hole, with actions that are none."""
    moves = [turn for turn in turns if turn != "fly"]
    return Earned(moves[-2:] == ["right", "down"], {"wrong_actions": len(turns) - len(moves)})


class Case(NamedTuple):
    """An environment, the turns that the policy draws, and what they earn."""
    name: str
    turns: list[list[str]]
    rule: Rule
    reward: str = "environment"
    package: str = "renderers"
    room: int = 600  # --generate_max_len; a smaller one ends responses whose reward comes at the end alone
    file: str = foreign.__file__


CASES = [
    Case("tools", [*calls("double", {"number": 2}, {"number": 5}), [ANSWER], ["4"]], doubled, "exact"),
    Case("Counter", [*COUNT, ["done"]], counted, room=41),
    Case("AgentInstance", [["3"], ["4"]], tried),
    Case("Agent", [["3"], ["4"]], tried, package="openrlhf", file=str(SUPPORT / "openrlhf_agent.py")),
    Case("Text", [["3"], ["4"]], lambda turns, seed: Earned(0.5 * len(turns), {"n": len(turns)})),
    Case("Problem", [["#### 3"], ["#### 4"]], lambda turns, seed: Earned(turns[0] == "#### 3"), package="skyrl_gym"),
    Case("Problems", [["#### 3"], ["#### 4"], ["4"]], solved, package="skyrl_gym"),
    Case("VerlTool", [*CHECK, ["done"]], checked, room=52),
    Case("VerlInteraction", [["3"], ["4"], ["5"]], lambda turns, seed: Earned("3" in turns, {"asked": len(turns)})),
    Case("Check", [*CHECK, ["done"]], checked, package="verl.tools.base_tool", file=str(SUPPORT / "verl_tool.py")),
    Case("Gsm8k", [["#### 3"], ["4"], ["5"]], lambda turns, seed: Earned("#### 3" in turns),
         package="verl.interactions.gsm8k_interaction", file=str(SUPPORT / "verl_interactions.py")),
    Case("Patient", [["3"], ["4"], ["5"]], lambda turns, seed: Earned("3" in turns, {"asked": len(turns)}),
         package="verl.interactions.base", file=str(SUPPORT / "verl_interactions.py")),
    Case("Pond", [["right"], ["down"], ["fly"]], crossed, package="gymnasium"),
    Case("Guess", [[f"[{number}]"] for number in range(1, 21)], guessed, package="textarena", room=230),
    Case("SwiftEnv", [["3"], ["4"]], lambda turns, seed: Earned(0.5 * len(turns), {"n": 2 * len(turns)})),
    Case("RllmEnv", [["3"], ["4"], ["5"]], lambda turns, seed: Earned("3" in turns)),
]


@pytest.fixture(name="seeds")
def fixture_seeds(monkeypatch):
    """The seeds of the sessions, by the uid of their prompts, one for each step."""
    seen, reset = {}, EnvironmentPool.reset
    monkeypatch.setattr(EnvironmentPool, "reset", lambda self, task, seed: seen.setdefault(task.uid, []).append(seed)
                        or reset(self, task, seed))  # yapf: disable
    return seen


def trained(home, **options):
    """A run of two steps, built as ``lightrft train`` does."""
    config = runs.config_of(home, home / "run", **OPTIONS | options)
    made = SPMDPPOTrainer(**trainer_arguments(config, runs.strategy_of(config), Timer(), {}))
    made.fit()
    return runs.Run(made, home / "run")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_steps(case, tmp_path, seeds, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(ORACLES)])
    pytest.importorskip(case.package)
    tool_models.save_chain(tmp_path / "model", case.turns)
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(ROW)}\n" * 2, encoding="utf-8")
    done = trained(tmp_path, environment=f"{case.file}:{case.name}", reward=[case.reward], max_turns=TURNS,
                   env_workers=1, generate_max_len=case.room)  # yapf: disable
    assert len(done.lines) == 2
    for step, line in enumerate(done.lines):
        rows = done.rollout(step + 1)
        assert len(rows) == 8 and all(row["error"] is None for row in rows)
        drawn = [turns_of(row) for row in rows]
        earned = [case.rule(turns, seeds[row["uid"]][4 * step]) for row, turns in zip(rows, drawn)]
        assert [row["reward"] for row in rows] == pytest.approx([float(each.reward) for each in earned])
        sums = Counter({"turns": sum(map(len, drawn))})
        for each in earned:
            sums.update(each.metrics)
        means = {f"env/{name}/mean": value / 8 for name, value in sums.items()}
        assert {name: line[name] for name in means} == pytest.approx(means)
        assert not any(line[f"env/{cause}"] for cause in FAILURES)
        assert line["reward/mean"] == pytest.approx(sum(each.reward for each in earned) / 8)
        assert {turn for turns in drawn for turn in turns} <= {"".join(turn) for turn in case.turns}
    assert all((row["messages"][0]["content"] == "sumdifficulty 2") == (case.name == "Counter") for row in rows), "TRL"
    assert all((row["messages"][0]["content"] == "Play.") == (case.name == "SwiftEnv") for row in rows), "in its place"
    assert all(row["prompt"].endswith("assistant\nThink of 3 or 4.\n") == case.name.startswith("Agent")
               for row in rows), "the observation that OpenRLHF begins with is the prompt"  # yapf: disable
    assert (sum(line["env/no_room"] for line in done.lines) > 0) == (case.room < 600)
    assert any(line["policy/grad_norm"] > 0 for line in done.lines), "no two responses had another reward"
    if case.name in ("tools", "Text"):
        files = DataConfig(prompt_data=[str(tmp_path / "run" / "rollouts" / "step_1.jsonl")], input_key="messages")
        assert len(SFTDataset(files, done.trainer.environment.tokenizer,
                              4000)) == 8, "supervised steps read them as they are"


def test_two_steps_on_reasoning_gym(tmp_path):
    """Its questions are the data, and its scorer is the reward."""
    gym = pytest.importorskip("reasoning_gym")
    tool_models.save_chain(tmp_path / "model", [[str(number)] for number in range(4)])
    done = trained(tmp_path, prompt_data=["reasoning_gym:count_bits?size=4&max_n=7"], apply_chat_template=True)
    score = gym.get_score_answer_fn("count_bits")
    for step, line in enumerate(done.lines, 1):
        rows = done.rollout(step)
        scores = [score(answer=row["response"].removesuffix("<|im_end|>"), entry={"answer": row["reference"]})
                  for row in rows]  # yapf: disable
        assert [row["reward"] for row in rows] == pytest.approx(scores)
        assert line["reward/mean"] == pytest.approx(sum(scores) / 8)
    assert any(line["policy/grad_norm"] > 0 for line in done.lines), "no two responses had another reward"


@pytest.mark.slow
@pytest.mark.skipif(not (ORACLES / "trl").is_dir(), reason="TRL is missing: make oracles")
def test_the_class_for_trl_is_one_that_trl_trains(tmp_path):
    """It adds up the calls there too, also those whose result finds no room, and is asked for its reward then."""
    tool_models.save_chain(tmp_path / "model", [*COUNT, ["done"]])
    script = SUPPORT / "trl_environment.py"
    done = subprocess.run([sys.executable, "-W", "ignore", script, tmp_path / "model", tmp_path / "run"], text=True,
                          env=os.environ | {"PYTHONPATH": f"{ROOT}:{ORACLES}"}, capture_output=True)  # yapf: disable
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    steps, rewards = zip(*found["seen"])
    assert [sum(each) for each in steps] == list(rewards) and max(map(len, steps)) > 2
    assert found["logged"] == pytest.approx([sum(rewards[:8]) / 8, sum(rewards[8:]) / 8])


def turns_of(row):
    """The turns that the policy drew, as text."""
    return [written(message) for message in row["messages"] if message["role"] == "assistant"]


def written(message):
    """The text of a message with its calls."""
    return message["content"] + "".join(f"<tool_call>{json.dumps(call['function'])}</tool_call>"
                                        for call in message.get("tool_calls", ()))  # yapf: disable
