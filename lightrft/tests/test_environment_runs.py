"""Real commands with an environment: on two ranks with tools that fail in every way, after kill -9, and where nothing
is trained."""
import io
import json
import os
import re
import signal
import sys
from importlib import import_module

import pytest

from lightrft import GRPO
from lightrft.cli.main import COMMANDS
from lightrft.tests.support import desk, environments, runs, tool_models
from lightrft.tests.support.launch import flags, launch, no_orphans, workers
from lightrft.tests.support.processes import alive, wait_until
from lightrft.utils.errors import UserError

LIMIT_S = 240.0  # of a run
FATES = ("hang", "raise", "flood", "exit", "speak", "answer")
MODEL = {"stop": list("abcdefghijklmnopqrstuvwxyz"), "generate_max_len": 240, "prompt_max_len": 96, "engine_kv_mib": 1}
PLAYED = {"environment": f"{environments.__file__}:Fated", "env_timeout_s": 1.5, "env_workers": 3}
DRAWN = {"advantage_estimator": "reinforce", "rollout_batch_size": 6, "n_samples_per_prompt": 1, "train_batch_size": 6,
         "reward": "environment", "max_steps": 2, "lr_scheduler": "constant", "reward_probe": "false",
         "no_self_test": True, "disable_ckpt": True, "actor_learning_rate": 1e-3}  # yapf: disable


def write_rows(path, *fates):
    rows = [{"prompt": [{"role": "user", "content": f"one {fate}"}], "reference": "7"} for fate in fates]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(name="home", scope="module")
def fixture_home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    tool_models.save_model(home / "model", num_hidden_layers=1)
    for name, fates in (("all", FATES), ("differ", ["differ"] * 6), ("hang", ["hang"] * 6), ("speak", ["speak"])):
        write_rows(home / f"{name}.jsonl", *fates)
    return home


def trained(home, folder, rows, **more):
    """The options of a run."""
    return MODEL | PLAYED | DRAWN | {"pretrain": home / "model", "prompt_data": home / f"{rows}.jsonl",
                                     "save_path": folder / "run"} | more  # yapf: disable


def hung_in(folder, run):
    """What tools have started that hang on both ranks of a run, whose workers have groups of their own."""
    files = folder.glob
    wait_until(lambda: all(each.read_text() for each in files("hung_*")) and len([*files("hung_*")]) == 2 or
               not run.processes[0].is_alive(), LIMIT_S)  # yapf: disable
    found = [int(each.read_text()) for each in files("hung_*")]
    assert len(set(map(os.getpgid, workers(folder)))) == 2 == len(found), run.output
    return found


@pytest.mark.dist
@pytest.mark.slow
def test_faults_of_environments_on_two_ranks(home, tmp_path):
    """Those of a tool cost its response. An error that one rank finds, and kill -9 of one, end both ranks. No worker
    stays, nor what a tool has started; nor after kill -9 of all ranks at once."""
    two = {"n_samples_per_prompt": 2, "train_batch_size": 12, "env_workers": 1}
    held_out = {"eval_data": home / "all.jsonl", "eval_steps": 2, "eval_temperature": 1.0}
    options = {"faults": trained(home, tmp_path / "faults", "all", save_trajectories=True, **held_out),
               "differs": trained(home, tmp_path / "differs", "differ", **two),
               **{name: trained(home, tmp_path / name, "hang", env_timeout_s=600, env_workers=1)
                  for name in ("killed", "whole")}}  # yapf: disable
    started = {name: launch(tmp_path / name, each, ranks=2) for name, each in options.items()}

    started_by_tools = [pid for name in ("killed", "whole") for pid in hung_in(tmp_path / name, started[name])]
    killed, whole = started["killed"], started["whole"]
    killed.signal(signal.SIGKILL, rank=1)
    assert killed.wait(LIMIT_S) == [1, -signal.SIGKILL], killed.output
    assert "rank 1 died without a message" in killed.output, killed.output
    whole.kill()
    assert whole.wait(LIMIT_S) == [-signal.SIGKILL] * 2, whole.output

    differs = started["differs"]
    assert differs.wait(LIMIT_S) == [2, 2], differs.output
    assert "rank 1 stopped the run" in differs.log(0) and "gave different messages" in differs.log(0), differs.output

    faults = started["faults"]
    assert faults.wait(LIMIT_S) == [0, 0], faults.output
    lines = runs.read_lines(tmp_path / "faults" / "run" / "metrics.jsonl")
    counts = {"timeout": 1, "exception": 2, "worker_died": 1, "no_room_at_start": 0, "max_turns": 0, "no_room": 0,
              "restarts": 0, "replays": 0}  # yapf: disable
    for prefix, line in (("env", lines[-2]), ("env", lines[-1]), ("eval/all/env", lines[-1])):
        assert {cause: line[f"{prefix}/{cause}"] for cause in counts} == counts, (prefix, line)
        assert line[f"{prefix}/turns/mean"] == (3 * 1 + 2 + 2 * 3) / 6
    assert [line["reward/unscored"] for line in lines[-2:]] == [4, 4] and lines[-1]["eval/all/unscored"] == 4
    assert 3 <= faults.output.count("an environment failed") <= 6, "the first failure of each cause, on each rank"
    spoken = [row["response"] for row in runs.read_lines(tmp_path / "faults" / "run" / "rollouts" / "step_1.jsonl")
              if row["reward"] is not None and "<tool_call>{}" not in row["response"]]  # yapf: disable
    assert sum("< tool_call>{}< /tool_call>" in text for text in spoken) == 1
    assert all(no_orphans(tmp_path / name) for name in started)
    assert wait_until(lambda: not any(map(alive, started_by_tools))), "what a tool has started"


def run(command, options, *more):
    """Run a command in this process to its good end."""
    try:
        import_module(COMMANDS[command][0]).main([*flags(MODEL | PLAYED | options), *more])
    except SystemExit as end:
        assert not end.code


def test_commands_that_do_not_train(home, tmp_path, monkeypatch, capsys):
    """They play the environment, show what it did, and leave no worker."""
    monkeypatch.chdir(tmp_path)
    options = {"pretrain": home / "model", "env_workers": 1, "temperature": 1}
    run("generate", options | {"prompt_data": home / "speak.jsonl", "output_path": tmp_path / "out.jsonl",
                               "score": "environment"})  # yapf: disable
    (row, ) = runs.read_lines(tmp_path / "out.jsonl")
    assert row["reward"] == 3.0 and row["play"]["turns"] == 3
    assert [message["role"] for message in row["messages"]] == ["user", *["assistant", "user"] * 2, "assistant"]

    run("evaluate", options | {"eval_data": home / "speak.jsonl", "output_path": tmp_path / "out",
                               "score": "environment", "n_samples": 2})  # yapf: disable
    assert [row["reward"] for row in runs.read_lines(tmp_path / "out" / "model.jsonl")] == [3.0, 3.0]

    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"please speak\n"), "utf-8"))
    run("chat", options)
    said = capsys.readouterr().out
    assert "\n[user] go on\n" in said and "< |im_start|>assistant" in said

    run("train", trained(home, tmp_path, "speak", rollout_batch_size=1, train_batch_size=1), "--dry_run")
    said = capsys.readouterr().out
    assert re.search("environment: a turn '7' is answered with '< .im_end.>.*, reward so far 1\n", said), said
    assert "environment 3 x 1; total 3\n" in said, said
    assert not (tmp_path / "run").exists() and no_orphans(tmp_path)


def test_a_program_gives_tools_or_an_environment(home):
    """A plan plays them; with an environment the reward is its own."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
    rows = [{"prompt": [{"role": "user", "content": "3+4?"}], "reference": call}] * 2
    options = {**MODEL, "prompt_max_len": 400, "generate_max_len": 100, "rollout_batch_size": 2,
               "n_samples_per_prompt": 2, "train_batch_size": 4, "reward_probe": False}  # yapf: disable
    shown = str(GRPO(home / "model", "exact", rows, tools=desk.add, **options).plan())
    assert "environment: tools of this program (tools), tools: add\n" in shown
    assert f"a turn {call!r} is answered with '7'" in shown
    run = GRPO(home / "model", train_dataset=rows, environment=environments.Uneven, **options)
    assert run.parsed.config.reward.reward == ["environment"]
    assert f"reward so far {len(call)}\n" in str(run.plan())
    with pytest.raises(UserError, match="an environment has its own tools; give one of the two"):
        GRPO(home / "model", environment=environments.Uneven, tools=[desk.add])
