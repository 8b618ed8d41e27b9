"""Checkpoint folders: complete, half-written, damaged, rotated, replaced, killed in the middle."""
import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from lightrft.config.schema import StrategyConfig
from lightrft.strategy.base import Prepared
from lightrft.strategy.checkpoint import CheckpointManager
from lightrft.strategy.checkpoint_folders import fault, folders, MARKER, newest
from lightrft.strategy.strategy import FakeStrategy
from lightrft.tests.support.launch import start
from lightrft.tests.support.tiny_lm import SPEC, TinyLM
from lightrft.utils.errors import UserError


@pytest.fixture(name="actor", scope="module")
def actor_fixture() -> Prepared:
    return FakeStrategy(StrategyConfig()).prepare(TinyLM(), SPEC)


def manager(folder: Path, **options) -> CheckpointManager:
    return CheckpointManager(FakeStrategy(StrategyConfig()), folder, **{"asynchronous": False, **options})


def save(one: CheckpointManager, actor: Prepared, step: int, **metrics: float) -> None:
    assert one.save(step, {"actor": actor}, {"step": step}, {}, metrics)


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folders(folder))


def test_layout_and_marker(tmp_path: Path, actor: Prepared) -> None:
    save(manager(tmp_path), actor, 12, acc=0.25)
    path = tmp_path / "step_000012"
    marker = json.loads((path / MARKER).read_text())
    assert (marker["step"], marker["world_size"], marker["metrics"]) == (12, 1, {"acc": 0.25})
    on_disk = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {MARKER}
    assert set(marker["files"]) == on_disk and {"global.pt", "rank_00000.pt", "tensors/.metadata"} < on_disk
    assert os.listdir(tmp_path) == ["step_000012"]


def test_the_writing_thread_is_on_the_gpu_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread starts on GPU 0, where the ranks of a machine would each open a context."""
    chosen = []
    one = manager(tmp_path)
    one.strategy.device = torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(
        (device, threading.current_thread().name)))
    monkeypatch.setattr(one, "_phase", lambda work: chosen.append("work") or True)
    assert one.save(1, {}, {}, {}, {})
    assert chosen == [(torch.device("cuda", 3), "checkpoint"), *["work"] * 4]


def _no_marker(path: Path) -> None:
    (path / MARKER).unlink()


def _bad_marker(path: Path) -> None:
    (path / MARKER).write_text("{", encoding="utf-8")


def _no_object(path: Path) -> None:
    (path / MARKER).write_text("[1]", encoding="utf-8")


def _other_content(path: Path) -> None:
    content = json.loads((path / MARKER).read_text(encoding="utf-8"))
    (path / MARKER).write_text(json.dumps(content | {"files": {"global.pt": 3}}), encoding="utf-8")


def _lost_file(path: Path) -> None:
    (path / "global.pt").unlink()


def _cut(path: Path) -> None:
    shard = next((path / "tensors").glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)


def _flipped(path: Path) -> None:
    data = bytearray((path / "rank_00000.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "rank_00000.pt").write_bytes(data)


@pytest.mark.parametrize("harm, text", [(_no_marker, "the checkpoint is incomplete"), (_bad_marker, "cannot be read"),
                                        (_no_object, "it describes no checkpoint"),
                                        (_other_content, "it gives no sizes of the files"),
                                        (_lost_file, "global.pt is missing"), (_cut, "damaged or cut short"),
                                        (_flipped, "rank_00000.pt is damaged")])
def test_incomplete_is_skipped_for_the_one_before(harm, text, tmp_path, actor, caplog) -> None:
    one = manager(tmp_path)
    save(one, actor, 1)
    save(one, actor, 2)
    assert one.latest() == tmp_path / "step_000002"
    harm(tmp_path / "step_000002")
    with caplog.at_level(logging.WARNING):
        assert one.latest() == tmp_path / "step_000001"
    assert text in caplog.text and "step_000002" in caplog.text
    save(one, actor, 3)  # a damaged one does not disturb the rotation
    save(one, actor, 2)  # the run gets there again
    assert one.latest() == tmp_path / "step_000003" and fault(tmp_path / "step_000002") is None


def test_a_run_does_not_start_over_where_no_checkpoint_is_complete(tmp_path, actor) -> None:
    one = manager(tmp_path)
    save(one, actor, 1)
    save(one, actor, 2)
    _no_object(tmp_path / "step_000001")
    _lost_file(tmp_path / "step_000002")
    with pytest.raises(UserError,
                       match="step_000002: global.pt is missing; step_000001: .*no checkpoint.*drop --load_ch"):
        one.latest()
    with pytest.raises(UserError, match="step_000001: is one checkpoint. Name the folder that it is in"):
        manager(tmp_path / "step_000001").latest()


def test_nothing_there(tmp_path: Path) -> None:
    assert manager(tmp_path / "absent").latest() is None
    (tmp_path / "step_x").mkdir()
    assert manager(tmp_path).latest() is None


def test_rotation_by_count_keeps_the_best(tmp_path: Path, actor: Prepared) -> None:
    one = manager(tmp_path, keep=2, best_metric="acc")
    for step, acc in enumerate((0.1, 0.9, float("nan"), 0.3, 0.9, 0.2, 0.1), 1):
        save(one, actor, step, acc=acc)
        assert step in steps(tmp_path)
    assert steps(tmp_path) == [5, 6, 7]  # of equal ones the newest is the best
    save(one, actor, 8)
    assert steps(tmp_path) == [5, 7, 8]


def test_a_best_metric_that_no_checkpoint_has_is_told_once(tmp_path, actor, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        one = manager(tmp_path / "never", keep=1, best_metric="reward/maen")
        save(one, actor, 1, acc=0.1)
        assert not caplog.records, "nothing was removed yet"
        for step in (2, 3):
            save(one, actor, step, acc=0.1)
        late = manager(tmp_path / "late", keep=1, best_metric="acc")
        save(late, actor, 1)
        save(late, actor, 2, acc=0.1)
    assert len(caplog.messages) == 1 and "--best_metric reward/maen" in caplog.text and "acc" in caplog.text


def test_rotation_by_size(tmp_path: Path, actor: Prepared) -> None:
    save(manager(tmp_path), actor, 1, acc=1.0)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) / 2**30
    for step in (2, 3, 4):
        save(manager(tmp_path, keep=10, keep_gib=2.5 * size), actor, step)
    assert steps(tmp_path) == [3, 4]
    save(manager(tmp_path, keep=10, keep_gib=size / 2), actor, 5)
    assert steps(tmp_path) == [5]


def test_replaces_a_checkpoint_of_the_same_step(tmp_path: Path, actor: Prepared) -> None:
    one = manager(tmp_path)
    save(one, actor, 1, acc=0.0)
    save(one, actor, 1, acc=1.0)
    assert os.listdir(tmp_path) == ["step_000001"]
    assert json.loads((tmp_path / "step_000001" / MARKER).read_text())["metrics"] == {"acc": 1.0}


def test_unwritable_folder_is_a_failed_save(tmp_path: Path, actor: Prepared, caplog) -> None:
    (tmp_path / "file").write_text("in the way")
    one = manager(tmp_path / "file" / "checkpoints")
    assert one.save(1, {"actor": actor}, {}, {}, {}) is False and one.failures == 1
    assert "could not save a checkpoint" in caplog.text


def test_a_model_that_was_not_saved(tmp_path: Path, actor: Prepared) -> None:
    one = manager(tmp_path)
    save(one, actor, 1)
    with pytest.raises(ValueError, match="no tensor critic/model/"):
        one.load(one.latest(), {"actor": actor, "critic": actor})
    evaluated = FakeStrategy(StrategyConfig()).prepare(TinyLM(seed=3))  # without an optimizer: the weights alone
    one.load(one.latest(), {"actor": evaluated})
    assert torch.equal(evaluated.model.model.lm_head.weight, actor.model.model.lm_head.weight)


ENDLESS = """
import sys
from pathlib import Path
from lightrft.strategy.tests.test_checkpoint import FakeStrategy, StrategyConfig, TinyLM, SPEC, manager
actor = FakeStrategy(StrategyConfig()).prepare(TinyLM(), SPEC)
one = manager(Path(sys.argv[1]), keep=2, asynchronous=True)
for step in range(1, 100000):
    one.save(step, {"actor": actor}, {"step": step}, {}, {})
"""


def test_kill_in_the_middle_leaves_a_complete_one(tmp_path: Path, actor: Prepared) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    process = start(tmp_path / "endless.py", [str(tmp_path / "it")], tmp_path / "log")
    tmp_path /= "it"
    deadline = time.monotonic() + 60
    while not any(step >= 3 for step in steps(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    found = newest(tmp_path)
    assert found is not None and int(found.name[5:]) >= 2
    one = manager(tmp_path)
    global_state, _ = one.load(one.latest(), {"actor": actor})
    assert global_state == {"step": int(found.name[5:])}
    save(one, actor, 10**5)
    assert not list(tmp_path.glob(".*")), "what the killed run left behind is gone"
