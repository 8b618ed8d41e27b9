"""Whether transformers loads, and whether the rollout engines that are installed fit what is beside them."""
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

from lightrft.cli.checks.finding import Finding
from lightrft.cli.checks.versions import CPU_TWINS, installed

ENGINES = ("vllm", "sglang")
SHARED = ("torch", "transformers", "tokenizers", "numpy")  # what an engine and lightrft both depend on
PROBE = "import transformers.image_utils; from transformers import AutoModelForCausalLM"  # image_utils: torchvision


def check_transformers(timeout_s: float = 120) -> Iterator[Finding]:
    """Import it as a training run does, in a process of its own: what breaks there cannot break the doctor."""
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        yield Finding("warn", "transformers", f"importing it takes more than {timeout_s:g} s",
                      "put the environment on a local disk, or try again when the machine is less busy")
        return
    if done.returncode == 0:
        yield Finding("ok", "transformers", "can be imported")
        return
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    yield Finding("fail", "transformers", f"cannot be imported: {reason}", _import_remedy(done.stderr))


def _import_remedy(trace: str) -> str:
    """A torchvision for CUDA beside a torch for CPUs (or of another release) is the known cause."""
    for name in ("torchvision", "torchaudio"):
        if name in trace:
            return f"{name} was built for another torch: pip uninstall {name}, or install the one that matches torch"
    return "pip install --force-reinstall transformers"


def check_engine(engine_type: str) -> Iterator[Finding]:
    """The chosen engine can be found; every installed one agrees with the packages beside it. Imports none of them."""
    if engine_type in ENGINES and find_spec(engine_type) is None:
        yield Finding("fail", "engine", f"--engine_type {engine_type}: not installed",
                      f"pip install 'lightrft[{engine_type}]', or --engine_type hf")
    else:
        yield Finding("ok", "engine", f"{engine_type} (--engine_type)")
    for name in ENGINES:
        if found := installed(name):
            conflicts = list(_conflicts(name))
            yield Finding("warn" if conflicts else "ok", name, f"{found}: " +
                          ("; ".join(conflicts) or "fits the packages beside it"),
                          f"pip install '{name}' in an environment of its own" if conflicts else "")


def _conflicts(name: str) -> Iterator[str]:
    """What the metadata of an engine asks of the shared packages and does not get."""
    from packaging.requirements import Requirement
    for requirement in map(Requirement, _requires(name)):
        here = installed(requirement.name) if requirement.name in SHARED else None
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if here and wanted and not requirement.specifier.contains(here, prereleases=True):
            yield f"it wants {requirement.name}{requirement.specifier}, {here} is installed"


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return requires(CPU_TWINS[name]) or []
