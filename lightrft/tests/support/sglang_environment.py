"""Commands in the environment that ``make test`` makes for SGLang, which also has Triton and Liger's kernels."""
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = "lightrft/tests/support"
PYTHON = Path(f"{sys.prefix}-sglang") / "bin" / "python"


def in_its_environment(*words: Any, limit_s: float = 1100, **environ: str) -> tuple[int, str]:
    """Run a command where SGLang is; its exit code and what it wrote."""
    if sys.version_info < (3, 11) or sys.platform != "linux":
        pytest.skip("SGLang 0.5.23 has wheels for Linux and Python 3.11 or newer only")
    if not (PYTHON.parents[1] / ".installed").exists():
        said = f"{PYTHON} is not there, so SGLANG IS NOT TESTED; `make {PYTHON.parents[1].name}/.installed` makes it"
        pytest.fail(said) if "CI" in os.environ else pytest.skip(said)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/{FOLDER}/sglang_cpu_shim", "PYTHONWARNINGS": "ignore"
    }
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(PYTHON.parents[1] / "pycache")}  # saves 5 s
    done = subprocess.run([str(word) for word in words], env=environment | compiled | environ, text=True, cwd=ROOT,
                          timeout=limit_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # yapf: disable
    return done.returncode, done.stdout
