"""The quickstart's data and its model after the warm-up, which takes a minute: made once for all tests."""
import os
from pathlib import Path

import pytest
from filelock import FileLock

from lightrft.tests.support.launch import finish, ROOT, run_script

PREPARE = ROOT / "examples" / "quickstart" / "prepare.py"


@pytest.fixture(name="warmed_up", scope="session")
def fixture_warmed_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the first two steps of the quickstart; fewer rows for GRPO, the same for the warm-up."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "warmed_up"
    with FileLock(f"{folder}.lock"):
        if not (folder / "sft" / "hf").exists():
            run_script(PREPARE, "--out", folder, "--train_rows", 2000, "--test_rows", 300)
            options = {"pretrain": folder / "base", "train_data": folder / "data" / "sft.parquet",
                       "save_path": folder / "sft", "train_batch_size": 32, "learning_rate": 3e-3, "max_len": 128,
                       "disable_ckpt": True}  # yapf: disable
            finish(folder, options, module="lightrft.cli.train_sft", limit_s=280)
    return folder
