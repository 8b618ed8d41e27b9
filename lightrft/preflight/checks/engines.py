"""Checks that transformers and the rollout engine load, and that installed engines fit the other packages."""
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires

from lightrft.config.engines import INSTALL
from lightrft.preflight.checks.finding import Finding
from lightrft.preflight.checks.versions import distribution, installed

SHARED = ("torch", "transformers", "tokenizers", "numpy")  # what an engine and lightrft both depend on
PROBES = {
    "transformers": "import transformers.image_utils; from transformers import AutoModelForCausalLM",  # torchvision too
    "vllm": "from vllm.v1.engine.llm_engine import LLMEngine",
    "sglang": "from sglang.srt.entrypoints.engine import Engine",
}


def check_import(name: str, timeout_s: float = 120) -> Iterator[Finding]:
    """Import a package as a training run does, in a separate process: a crash there cannot break the doctor."""
    try:
        done = subprocess.run([sys.executable, "-c", PROBES[name]], capture_output=True, text=True, timeout=timeout_s,
                              stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        yield Finding("warn", name, f"importing it takes more than {timeout_s:g} s",
                      "put the environment on a local disk, or try again when the machine is less busy")
        return
    if done.returncode == 0:
        yield Finding("ok", name, "can be imported")
        return
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    yield Finding("fail", name, f"cannot be imported: {reason}", _import_remedy(name, done.stderr))


def _import_remedy(name: str, trace: str) -> str:
    """Name the remedy. The known cause is a torchvision for CUDA with a torch for CPUs, or with another release."""
    for other in ("torchvision", "torchaudio"):
        if other in trace:
            return f"{other} was built for another torch: pip uninstall {other}, or install the one that matches torch"
    return f"pip install --force-reinstall {distribution(name)}"


def check_engine(chosen: str) -> Iterator[Finding]:
    """Check that the chosen engine loads and that every installed one fits the other packages. (Missing: see versions.)

    Args:
        chosen: ``--engine_type``; "hf" comes with lightrft and needs nothing more.
    """
    for name in filter(installed, INSTALL):
        if conflicts := list(_conflicts(name)):
            yield Finding("warn", name, "; ".join(conflicts),
                          f"pip install {distribution(name)} in an environment of its own")
        else:
            yield Finding("ok", name, "fits the packages beside it")
    if chosen in INSTALL and installed(chosen):
        yield from check_import(chosen)


def _conflicts(name: str) -> Iterator[str]:
    """Yield the unmet requirements of an engine on the shared packages, by its metadata."""
    from packaging.requirements import Requirement
    for requirement in map(Requirement, requires(distribution(name)) or []):
        here = installed(requirement.name) if requirement.name in SHARED else None
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if here and wanted and not requirement.specifier.contains(here, prereleases=True):
            yield f"it wants {requirement.name}{requirement.specifier}, {here} is installed"
