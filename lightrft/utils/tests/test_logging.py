"""Who may speak, and how a progress bar looks in a file."""
import subprocess
import sys

import pytest

CODE = """
import time
from lightrft.utils.logging import get_logger, warn_of_all
from lightrft.utils import progress as module
module.LOG_INTERVAL_S = 0.0
get_logger().info("fact")
get_logger().warning("worry")
warn_of_all("worry of all")
get_logger().info("  row", extra={"plain": True})
for _ in module.progress(range(3), "training"):
    time.sleep(0.01)
bar = module.progress(7, "warming up")
bar.update(3)
bar.close()
"""


def output(**environment):
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "", "the log goes to stderr"
    return run.stderr


def test_rank_0_says_everything():
    text = output()
    lines = text.splitlines()
    assert lines[0].endswith(" fact") and lines[1].endswith(" WARNING: worry") and lines[3] == "  row"
    assert lines[2].endswith(" WARNING: worry of all")
    assert "training: 100%" in text and "3/3" in text and "warming up:  43%" in text and "\r" not in text, text


def test_other_ranks_only_warn():
    lines = output(RANK="1").splitlines()
    assert len(lines) == 1 and lines[0].endswith(" [rank 1] WARNING: worry"), lines


@pytest.mark.parametrize("level,count", [("ERROR", 0), ("WARNING", 1)])
def test_the_level_can_be_set(level, count):
    assert output(LIGHTRFT_LOG_LEVEL=level).count(": worry\n") == count
