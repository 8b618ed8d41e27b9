"""A run that was killed and continued leaves, byte for byte, what the uninterrupted run leaves."""
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightrft.tests.support import tiny
from lightrft.tests.support.launch import PYTHON, ROOT, Launched, finish, flags, launch, no_orphans
from lightrft.tests.support.tiny_task import OPTIONS, write_home
from lightrft.tests.support.warm import warm_environ, warm_python

pytestmark = [pytest.mark.dist, pytest.mark.slow]
VOLATILE = re.compile("time/|perf/|.*tokens_per_s$")
STATEFUL: dict[str, Any] = {  # one mini-batch in each epoch: a run is stopped between steps, not inside of one
    "max_steps": 6, "n_samples_per_prompt": 2, "advantage_estimator": "gae", "init_kl_coef": 0.05, "kl_target": 0.01,
    "kl_horizon": 100, "reward_running_norm": True, "max_epochs": 2, "critic_learning_rate": 3e-3, "ptx_batch_size": 6
}


@pytest.fixture(name="home", scope="module")
def home_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_home(tmp_path_factory.mktemp("resume"))


@pytest.fixture(name="straight", scope="module")
def straight_fixture(home: Path) -> dict[int, Path]:
    """Uninterrupted runs, by number of ranks; that of one rank by the real command."""
    folders = {ranks: home / f"straight_{ranks}" for ranks in (1, 2)}
    command = [*PYTHON, *flags(options_of(home, folders[1]))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as single:
        finish(folders[2], options_of(home, folders[2]), ranks=2)
        output, _ = single.communicate(timeout=120)
    assert single.returncode == 0, output
    return folders


def options_of(home: Path, folder: Path, **more: Any) -> dict[str, Any]:
    rows = home / "train.jsonl"
    return OPTIONS | STATEFUL | {
        "pretrain": home / "model", "prompt_data": rows, "pretrain_data": rows, "eval_data": home / "test.jsonl",
        "reward": home / "reward.py", "save_path": folder / "run"
    } | more


def metrics(folder: Path) -> list[str]:
    """The lines of metrics.jsonl without times."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [json.dumps({k: v for k, v in line.items() if not VOLATILE.match(k)}) for line in lines]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "hf" / "model.safetensors")


def rollouts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "run" / "rollouts").glob("step_*.jsonl")}


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


def assert_bitwise(folder: Path, straight: Path) -> None:
    assert metrics(folder) == metrics(straight)
    assert rollouts(folder) == rollouts(straight)
    ours, theirs = weights(folder), weights(straight)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    asked = [step for step in map(number_of, checkpoints(folder)) if step % 2]  # saved when the run was asked to stop
    assert checkpoints(folder) == kept(straight, asked)


def number_of(name: str) -> int:
    return int(name.removeprefix("step_"))


def kept(folder: Path, asked: list[int]) -> list[str]:
    """The last two of the checkpoints of even steps, and the best of these and of the steps ``asked``."""
    rows = {row["step"]: row for row in map(json.loads, metrics(folder))}
    even = [step for step in rows if step and step % 2 == 0]
    best = max((*even, *asked), key=lambda step: (rows[step]["reward/mean"], step))
    return [f"step_{step:06d}" for step in sorted({best, *even[-2:]})]


def assert_close(folder: Path, straight: Path, limit: float = 1e-5) -> None:
    for ours, theirs in zip(metrics(folder), metrics(straight), strict=True):
        one, other = json.loads(ours), json.loads(theirs)
        assert one == pytest.approx(other, abs=limit, rel=limit), f"step {one['step']}"
    ours, theirs = weights(folder), weights(straight)
    assert max((ours[key] - theirs[key]).abs().max().item() for key in ours) < limit


def wait_for_step(run: Launched, folder: Path, step: int) -> None:
    """Until the metrics of ``step`` are written, or the run is over; step 0 is the start of the run."""
    path, end = folder / "run" / "metrics.jsonl", time.monotonic() + 60
    if step == 0:
        run.until("each step:")
    while time.monotonic() < end and run.processes[0].is_alive():
        if step == 0 or path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.002)


def stop_at(home: Path, folder: Path, step: int, number: int, ranks: int = 1,
            **more: Any) -> tuple[Launched, list[int]]:
    """Run until the metrics of ``step`` are there, send a signal, and wait."""
    run = launch(folder, options_of(home, folder, **more), ranks)
    wait_for_step(run, folder, step)
    run.signal(number)
    return run, run.wait()


def test_the_straight_run_is_a_test_of_something(straight: dict[int, Path]) -> None:
    rows = [json.loads(line) for line in metrics(straight[1])]
    assert [row["step"] for row in rows] == list(range(7)), "evaluation at the start, then every step"
    assert "eval/all/reward@1" in rows[0] and "eval/all/reward@1" in rows[4] and "eval/all/reward@1" not in rows[3]
    assert len({row["policy/kl_coef"] for row in rows[1:]}) > 4, "the KL coefficient does not adapt"
    assert all(row["policy/grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in rows[1:])
    assert len({row["reward/mean"] for row in rows[1:]}) > 4
    assert list((straight[1] / "run" / "tensorboard").iterdir())


def test_rotation_keeps_two_and_the_best(straight: dict[int, Path]) -> None:
    assert checkpoints(straight[1]) == kept(straight[1], [])


def test_two_ranks_train_as_one_does(straight: dict[int, Path]) -> None:
    assert_close(straight[2], straight[1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_random_moments(ranks: int, home: Path, straight: dict[int, Path]) -> None:
    """kill -9, again and again: during start, steps, saves, and perhaps the export."""
    rng, folder, kills = random.Random(ranks), home / f"killed_{ranks}", 0
    options = options_of(home, folder, load_checkpoint=True)
    for step in [0, *sorted(rng.sample(range(1, 7), 4))]:
        run = launch(folder, options, ranks)
        wait_for_step(run, folder, step)
        time.sleep(rng.uniform(0.0, 0.1))
        kills += all(process.is_alive() for process in run.processes)
        run.kill()
        assert no_orphans(folder)
        assert {process.exitcode for process in run.processes} <= {0, -signal.SIGKILL}, run.output
    finish(folder, options, ranks)
    assert kills >= 3
    assert_bitwise(folder, straight[ranks])


@pytest.mark.parametrize("before,after", [(2, 1), (1, 2)])
def test_another_number_of_ranks(before: int, after: int, home: Path, straight: dict[int, Path]) -> None:
    folder = home / f"from_{before}_to_{after}"
    run, codes = stop_at(home, folder, 3, signal.SIGTERM, before)
    assert codes == [143] * before, run.output
    run = finish(folder, options_of(home, folder, load_checkpoint=True), after)
    assert "resumed from" in run.output
    assert_close(folder, straight[after])


@pytest.mark.parametrize("number,code,ranks", [(signal.SIGTERM, 143, 2), (signal.SIGINT, 130, 1)])
def test_asked_to_stop(number: int, code: int, ranks: int, home: Path, straight: dict[int, Path]) -> None:
    folder = home / f"asked_{code}"
    run, codes = stop_at(home, folder, 3, number, ranks)
    assert codes == [code] * ranks and "--load_checkpoint resumes from there" in run.output, run.output
    assert "Traceback" not in run.output, run.output
    assert no_orphans(folder)
    finish(folder, options_of(home, folder, load_checkpoint=True), ranks)
    assert_bitwise(folder, straight[ranks])


def test_stopped_right_after_a_save_keeps_its_metrics(home: Path, straight: dict[int, Path]) -> None:
    """The checkpoint of a step that was saved in time stays a candidate for the best one."""
    folder = home / "after_save"
    stop_at(home, folder, 2, signal.SIGTERM)
    for path in (folder / "run" / "checkpoints").glob("step_*"):
        assert "reward/mean" in json.loads((path / "COMPLETE.json").read_text())["metrics"], path.name
    finish(folder, options_of(home, folder, load_checkpoint=True))
    assert_bitwise(folder, straight[1])


def test_stopped_before_the_first_step(home: Path, straight: dict[int, Path]) -> None:
    folder = home / "early"
    run = launch(folder, options_of(home, folder))
    run.until("each step:")
    run.signal(signal.SIGTERM)
    assert run.wait() == [143], run.output
    finish(folder, options_of(home, folder, load_checkpoint=True))
    assert_bitwise(folder, straight[1])


def test_half_written_and_damaged_checkpoints_are_skipped(home: Path, straight: dict[int, Path]) -> None:
    folder = home / "damaged"
    stop_at(home, folder, 5, signal.SIGKILL)
    saved = folder / "run" / "checkpoints"
    shutil.copytree(saved / "step_000002", saved / "step_000099")
    (saved / "step_000099" / "COMPLETE.json").unlink()
    shutil.copytree(saved / "step_000002", saved / "step_000098")
    shard = next((saved / "step_000098" / "tensors").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    shutil.copytree(saved / "step_000002", saved / ".step_000006.tmp")
    run = finish(folder, options_of(home, folder, load_checkpoint=True))
    assert run.output.count("skipping the checkpoint") == 2, run.output
    for name in ("step_000098", "step_000099"):
        shutil.rmtree(saved / name, ignore_errors=True)
    assert metrics(folder) == metrics(straight[1]) and rollouts(folder) == rollouts(straight[1])


def test_lora_resumes(home: Path) -> None:
    more = {"lora_rank": 4, "max_steps": 4, "eval_steps": 0, "eval_at_start": False}
    more |= {"advantage_estimator": "rloo", "critic_learning_rate": 9e-6}  # the default: there is no critic
    finish(home / "lora", options_of(home, home / "lora", **more))
    folder = home / "lora_stopped"
    stop_at(home, folder, 2, signal.SIGKILL, **more)
    finish(folder, options_of(home, folder, load_checkpoint=True, **more))
    assert_bitwise(folder, home / "lora")


def test_a_finished_run_is_left_as_it_is(home: Path, straight: dict[int, Path]) -> None:
    folder = home / "again"
    shutil.copytree(straight[1], folder)
    finish(folder, options_of(home, folder, load_checkpoint=True))
    assert_bitwise(folder, straight[1])


def test_without_asking_a_new_run_moves_the_old_metrics_aside(home: Path, straight: dict[int, Path]) -> None:
    folder = home / "anew"
    shutil.copytree(straight[1], folder)
    finish(folder, options_of(home, folder, max_steps=1))
    assert (folder / "run" / "metrics.1.jsonl").read_bytes() == (straight[1] / "run" / "metrics.jsonl").read_bytes()


def test_torchrun_killed_and_continued(home: Path) -> None:
    """A policy and a critic with state, by the real launcher: its agent dies with its ranks, the next one continues."""
    models = {name: tiny.save_model(home / name, name, initializer_range=0.1) for name in ("qwen3_5", "bamba")}
    more = {"pretrain": models["qwen3_5"], "critic_pretrain": models["bamba"], "max_steps": 4}
    folder, straight = home / "torchrun", home / "straight_states"
    finish(straight, options_of(home, straight, **more), ranks=2)
    words = flags(options_of(home, folder, load_checkpoint=True, **more))
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *PYTHON[1:]]
    folder.mkdir()
    first = subprocess.Popen([*command, *words], cwd=ROOT, env=os.environ | warm_environ(), start_new_session=True,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    path, end = folder / "run" / "metrics.jsonl", time.monotonic() + 90
    while time.monotonic() < end and not (path.exists() and '"step": 3,' in path.read_text()):
        time.sleep(0.01)
    first.kill()
    first.wait()
    done = subprocess.run([*command, *words], cwd=ROOT, env=os.environ | warm_environ(), capture_output=True, text=True,
                          timeout=120)  # yapf: disable
    assert done.returncode == 0 and "resumed from" in done.stdout + done.stderr, done.stderr
    assert_bitwise(folder, straight)
