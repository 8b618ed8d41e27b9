"""Small runs that are refused or harmed, for tests of what the user is told and of what is left."""
import json
from pathlib import Path
from typing import Any

import pytest

from lightrft.tests.support.launch import errors, Launched, launch, no_orphans
from lightrft.tests.support.tiny_task import OPTIONS, write_home

SHORT: dict[str, Any] = {
    "max_steps": 4, "save_steps": 1, "train_batch_size": 32, "use_tensorboard": False, "eval_at_start": False,
    "eval_steps": 0, "generate_max_len": 6, "best_metric": "none"
}  # yapf: disable


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data and a reward."""
    return write_home(tmp_path_factory.mktemp("bad"))


def options_of(home: Path, folder: Path, **more: Any) -> dict[str, Any]:
    return OPTIONS | SHORT | {
        "pretrain": home / "model", "prompt_data": home / "train.jsonl", "reward": home / "reward.py", "save_path":
        folder / "run"
    } | more


def steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def assert_refused(run: Launched, *words: str, code: int = 2, told_by: int = 0) -> None:
    """One error line on one rank, no traceback, every rank out with ``code``, no worker left."""
    assert (codes := run.wait()) == [code] * len(run.processes), f"{codes}\n{run.output}"
    assert "Traceback" not in run.output, run.output
    expected = [len(errors(run.log(rank))) for rank in range(len(run.logs))]
    assert expected[told_by] == 1 and sum(expected) == 1, run.output
    for word in words:
        assert word in run.log(told_by), f"{word!r} is missing in\n{run.log(told_by)}"
    assert no_orphans(run.logs[0].parent)


def refused(home: Path, folder: Path, *words: str, ranks: int = 1, **more: Any) -> None:
    assert_refused(launch(folder, options_of(home, folder, **more), ranks), *words)


def write_reward(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "reward.py").write_text(text, encoding="utf-8")
    return folder / "reward.py"
