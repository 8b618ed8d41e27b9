"""Whatever is wrong: a clear message, a non-zero exit, nothing lost, no rank and no worker left behind."""
import json
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import BertConfig, T5Config

from lightrft.strategy.checkpoint_folders import folders, newest
from lightrft.tests.support import bad_input, tiny
from lightrft.tests.support.bad_input import assert_refused, options_of, refused, steps, write_reward
from lightrft.tests.support.launch import PYTHON, ROOT, Launched, finish, flags, launch, no_orphans
from lightrft.tests.support.tiny_task import BAD_LOSS, rows, write_rows
from lightrft.tests.support.warm import warm_environ, warm_python

pytestmark = [pytest.mark.dist, pytest.mark.slow]
home = bad_input.home


@pytest.fixture(name="trained", scope="module")
def trained_fixture(home: Path) -> Path:
    """A run of two steps with its checkpoints."""
    finish(home / "trained", options_of(home, home / "trained", max_steps=2))
    return home / "trained"


@pytest.fixture(name="broken", scope="module", autouse=True)
def broken_fixture(home: Path) -> dict[str, Launched]:
    """Runs of two ranks in which rank 1 comes to grief at its third step. They mostly wait, so all begin with the first
    test of this file, long before those that look at them."""
    kinds = {"raise": {}, "exit": {}, "kill": {}, "hang": {"dist_timeout_s": 16}}
    more = BAD_LOSS | {"max_steps": 50}
    return {
        kind: launch(home / kind, options_of(home, home / kind, **more, **own), 2, FAULT=f"{kind}@1:3")
        for kind, own in kinds.items()
    }


# -- data -------------------------------------------------------------------------------------------------------------
def _lines(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    change(content := rows(10))
    write_rows(path, content)


DATA: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing": (lambda path: None, ("data.jsonl", "no such file")),
    "empty": (lambda path: path.write_text(""), ("data.jsonl", "empty", "Write the data again")),
    "truncated": (lambda path: path.write_text(json.dumps(rows(1)[0]) + "\n" + json.dumps(rows(1)[0])[:30]),
                  ("data.jsonl, line 2", "cut off", "write it again")),
    "mixed": (lambda path: _lines(path, lambda some: some[3].update(prompt=[{"role": "user", "content": "x"}])),
              ("data.jsonl, row 4", "mixed schema", "one schema")),
    "no prompt": (lambda path: _lines(path, lambda some: some[4].pop("prompt")),
                  ("data.jsonl, row 5", "no prompt", "--input_key")),
    "no answer": (lambda path: _lines(path, lambda some: some[5].pop("reference")),
                  ("data.jsonl, row 6", "no answer", "--reference_key")),
    "not utf-8": (lambda path: path.write_bytes(b'{"prompt": "caf\xe9", "reference": "1"}\n'),
                  ("data.jsonl, line 1", "not UTF-8", "iconv")),
    "duplicate ids": (lambda path: _lines(path, lambda some: [row.update(id=min(i, 7)) for i, row in enumerate(some)]),
                      ("data.jsonl, row 9", "duplicate id", "'7'", "row 8")),
    "all too long": (lambda path: write_rows(path, [{"prompt": "x" * 100, "reference": "1"}] * 9),
                     ("all 9 prompts are longer than --prompt_max_len 64", "Raise it")),
    "too few": (lambda path: write_rows(path, rows(5)), ("_batch_size 8: a batch cannot be filled", "the data has 5")),
}  # yapf: disable


@pytest.mark.parametrize("name", DATA)
def test_data(name: str, home: Path, tmp_path: Path) -> None:
    write, words = DATA[name]
    write(tmp_path / "data.jsonl")
    refused(home, tmp_path, *words, prompt_data=tmp_path / "data.jsonl")


def test_truncated_parquet(home: Path, tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_bytes(b"PAR1 and then nothing")
    refused(home, tmp_path, "data.parquet", "not a complete parquet file", prompt_data=tmp_path / "data.parquet")


def test_a_long_prompt_is_an_error_when_asked(home: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", [*rows(9), {"prompt": "x" * 100, "reference": "1"}])
    refused(home, tmp_path, "1 of 10 rows are longer than --prompt_max_len 64", "row 10", "--overlong_prompt filter",
            prompt_data=data, overlong_prompt="error")


def test_a_long_prompt_is_left_out_and_counted(home: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": "x" * 100, "reference": "1"}, *rows(9)])
    run = finish(tmp_path, options_of(home, tmp_path, prompt_data=data, max_steps=1))
    assert "1 of 10 rows are longer than --prompt_max_len 64" in run.output and "left out" in run.output


# -- models -----------------------------------------------------------------------------------------------------------
def _no_eos(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": None}))


MODELS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "absent": (shutil.rmtree, ("--pretrain", "model: no such folder")),
    "no config": (lambda folder: (folder / "config.json").unlink(), ("no config.json", )),
    "no tokenizer": (lambda folder: [path.unlink() for path in folder.glob("*token*")], ("no tokenizer", "copy")),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ("cannot load the weights", )),
    "cut weights": (lambda folder: os.truncate(folder / "model.safetensors", 5000), ("cannot load the weights", )),
    "encoder": (lambda folder: BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(folder),
                ("wrong architecture", "bert", "Qwen2")),
    "encoder-decoder": (lambda folder: T5Config().save_pretrained(folder), ("wrong architecture", "t5", "Qwen2")),
    "no eos": (_no_eos, ("no eos token", "tokenizer_config.json")),
}


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, home: Path, tmp_path: Path) -> None:
    harm, words = MODELS[name]
    shutil.copytree(home / "model", tmp_path / "model")
    harm(tmp_path / "model")
    refused(home, tmp_path, *words, pretrain=tmp_path / "model")


def test_a_missing_pad_token_becomes_eos(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "model", tmp_path / "model")
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": None}))
    run = finish(tmp_path, options_of(home, tmp_path, pretrain=tmp_path / "model", max_steps=1))
    assert "has no pad token: eos '<|im_end|>' is used" in run.output


def test_unknown_chat_template(home: Path, tmp_path: Path) -> None:
    refused(home, tmp_path, "chat", "'chatmml'", "chatml", chat_template="chatmml")


# -- checkpoints ------------------------------------------------------------------------------------------------------
def test_checkpoint_of_another_model(home: Path, trained: Path, tmp_path: Path) -> None:
    """Refused, naming a tensor; metrics and checkpoints stay as they are."""
    shutil.copytree(trained / "run", tmp_path / "run")
    tiny.save_model(tmp_path / "other", hidden_size=16)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    refused(home, tmp_path, "is a checkpoint of another model", "embed_tokens", "[260, 32]", "[260, 16]",
            pretrain=tmp_path / "other", load_checkpoint=True)
    changed = [path.name for path, content in before.items() if path.read_bytes() != content]
    assert changed == ["config.yaml"], changed


def test_checkpoint_of_other_data(home: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    refused(home, tmp_path, "data sets of [20] rows, now they have [9]", "Use the same data",
            prompt_data=write_rows(tmp_path / "data.jsonl", rows(9)), load_checkpoint=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (trained / "run" / "metrics.jsonl").read_bytes()


def test_a_new_run_in_an_old_folder_keeps_the_old_checkpoints_apart(home: Path, trained: Path, tmp_path: Path) -> None:
    """Neither may the old ones rotate the new ones away, nor may a later resume pick the old run."""
    shutil.copytree(trained / "run", tmp_path / "run")
    finish(tmp_path, options_of(home, tmp_path, max_steps=1, seed=7))
    assert [path.name for path in folders(tmp_path / "run" / "checkpoints")] == ["step_000001"]
    assert len(folders(tmp_path / "run" / "checkpoints.1")) == 2, "the checkpoints of the old run are lost"
    assert (tmp_path / "run" / "metrics.1.jsonl").is_file()


# -- disk -------------------------------------------------------------------------------------------------------------
def test_no_room_for_a_checkpoint(home: Path, tmp_path: Path) -> None:
    """Files may not grow beyond 150 KiB: checkpoints fail, training goes on, the run says so."""
    run = launch(tmp_path, options_of(home, tmp_path), limits={resource.RLIMIT_FSIZE: 150 << 10})
    assert run.wait() == [0], run.output
    assert "could not save a checkpoint" in run.output and "MiB free)" in run.output, run.output
    assert [row["step"] for row in steps(tmp_path)] == [1, 2, 3, 4]
    assert not list((tmp_path / "run" / "checkpoints").iterdir()), "half a checkpoint was left"
    assert f"checkpoints; {run.output.count('could not save a ')} could not be written" in run.output, run.output


@pytest.mark.parametrize("ranks,room,aside", [(1, 1.7, 1), (2, 1.7, 1), (2, 1.45, 1), (1, 1.7, 0), (2, 1.45, 0)])
def test_disk_full(ranks: int, room: float, aside: bool, home: Path, trained: Path, tmp_path: Path) -> None:
    """A file system that holds ``room`` checkpoints; the first stays loadable, whatever cannot be written after it.
    What is written ``aside`` may first be met as no room for a line of metrics, which ends the run."""
    disk, folder, rescued = tmp_path / "disk", tmp_path / "disk" / "it", tmp_path / "rescued"
    disk.mkdir()
    size = sum(path.stat().st_size for path in (trained / "run/checkpoints/step_000001").rglob("*") if path.is_file())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(room * size) >> 10}k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        run = launch(folder,
                     options_of(home, folder, max_ckpt_num=1, max_steps=3, async_save=str(bool(aside)), report="False"),
                     ranks)
        codes = run.wait()
        assert "No space left on device" in run.output, run.output
        assert "could not save a checkpoint" in run.output or aside and codes[0], run.output
        assert codes in ([0] * ranks, [1] * ranks), run.output
        assert "Traceback" not in run.output, run.output
        assert codes[0] == 0 or f"cannot write to {folder}" in run.log(0), run.output
        kept = newest(folder / "run" / "checkpoints")
        assert kept is not None, run.output
        shutil.copytree(folder / "run", rescued / "run")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    finish(rescued, options_of(home, rescued, max_steps=3, load_checkpoint=True), ranks)
    assert [row["step"] for row in steps(rescued)] == [1, 2, 3]


# -- numbers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["nan", "gradient"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_is_not_finite_is_skipped_everywhere(kind: str, ranks: int, home: Path, tmp_path: Path) -> None:
    """One bad micro-batch on the last rank: no rank steps, one step is counted, the run goes on and ends well."""
    options = options_of(home, tmp_path, **BAD_LOSS, init_kl_coef=0.05, kl_target=0.01)
    run = finish(tmp_path, options, ranks, FAULT=f"{kind}@{ranks - 1}:2")
    found = [(row["policy/optimizer_steps"], row["policy/skipped_steps"]) for row in steps(tmp_path)]
    assert found == [(1, 0), (0, 1), (1, 0), (1, 0)], run.output
    assert all(row["policy/kl_coef"] is not None and row["policy/kl_coef"] > 0 for row in steps(tmp_path))
    assert "optimizer step skipped on all ranks" in run.output
    weights = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_three_bad_steps_in_a_row_end_the_run(ranks: int, home: Path, tmp_path: Path) -> None:
    options = options_of(home, tmp_path, **BAD_LOSS, max_steps=8)
    run = launch(tmp_path, options, ranks, FAULT=f"nan@{ranks - 1}:3-9")
    assert run.wait() == [1] * ranks, run.output
    assert "3 optimizer steps in a row had a non-finite loss" in run.log(0) and "--max_bad_steps" in run.log(0)
    assert "Traceback" not in run.output and "stops for that reason" not in run.output, run.output
    assert [row["step"] for row in steps(tmp_path)] == [1, 2, 3, 4]
    assert newest(tmp_path / "run" / "checkpoints") is not None and no_orphans(tmp_path)


# -- ranks ------------------------------------------------------------------------------------------------------------
def test_two_ranks_tell_an_error_once(home: Path, tmp_path: Path) -> None:
    """What every rank finds at the same time is rank 0's to tell; no rank blames another."""
    cases = {
        "data": {"prompt_data": write_rows(tmp_path / "few.jsonl", rows(5))},
        "model": {"pretrain": shutil.copytree(home / "model", tmp_path / "model")},
        "reward": {"reward": write_reward(tmp_path / "none", "def reward_func(queries)\n")},
        "config": {"rollout_batch_size": 1},
    }  # yapf: disable
    _no_eos(tmp_path / "model")
    words = {"data": "the data has 5", "model": "no eos token", "reward": "line 1", "config": "--rollout_batch_size 1"}
    runs = {name: launch(tmp_path / name, options_of(home, tmp_path / name, **more), 2) for name, more in cases.items()}
    for name, run in runs.items():
        assert_refused(run, words[name])
        assert "stops for that reason" not in run.output, run.output


def test_an_error_of_one_rank_ends_both(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("import os\nassert os.environ['RANK'] == '0', 'no GPU here'\n" + (home / "reward.py").read_text())
    soon = tmp_path / "soon.py"  # rank 0 is not waited for to say the same
    soon.write_text("from lightrft.utils import watchdog\nwatchdog._RANK_0_FIRST_S = 0.5\n")
    began = time.monotonic()
    run = launch(tmp_path, options_of(home, tmp_path, reward=path, plugin=soon), 2)
    assert run.wait() == [2, 2] and time.monotonic() - began < 60, run.output
    assert "rank 1 stopped the run: reward file" in run.log(0) and "no GPU here" in run.log(0), run.output
    assert "[rank 1] ERROR: reward file" in run.log(1) and no_orphans(tmp_path), run.output


@pytest.mark.parametrize("kind,what,stack", [
    ("raise", "rank 1 raised RuntimeError: the loss of this rank is broken", "in faulty"),
    ("exit", "rank 1 died without a message", "its stack is unknown"),
    ("kill", "rank 1 died without a message", "its stack is unknown"),
    ("hang", "rank 1 made no progress for", "time.sleep(1000)"),
])
def test_a_rank_that_comes_to_grief(kind: str, what: str, stack: str, home: Path, broken: dict[str, Launched]) -> None:
    """The other one ends within a minute, non-zero, and says who, where, and both stacks."""
    run = broken[kind]
    codes = run.wait(60.0)
    assert codes[0] == 1 and codes[1] in {"raise": [1], "exit": [7], "kill": [-9], "hang": [1]}[kind], run.output
    assert what in run.output and stack in run.output, run.output
    assert kind in ("exit", "kill") or "in phase forward" in run.output.split(what)[1], run.output
    assert re.search("stops for that reason, in phase (forward|backward|update)", run.output), run.output
    assert "rank 0 stops for that reason" in run.log(0) or kind == "hang", run.output
    assert len(steps(home / kind)) == 2 and newest(home / kind / "run" / "checkpoints") is not None
    assert no_orphans(home / kind)


def test_torchrun_tells_a_user_error_once(home: Path, tmp_path: Path) -> None:
    """The real launcher around it: our line appears once, at the end, no traceback of ours, exit code not 0."""
    words = flags(options_of(home, tmp_path, prompt_data=write_rows(tmp_path / "few.jsonl", rows(5))))
    launcher = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = os.environ | warm_environ() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *PYTHON[1:], *words], cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env=environ)
    assert done.returncode and re.findall("the data has 5.*\n(.*)", done.stderr) == ["=" * 60], done.stderr
