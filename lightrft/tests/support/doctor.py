"""Configurations for the doctor, and its findings."""
from collections.abc import Iterable
from typing import Any

from lightrft.config.schema import Config
from lightrft.config.tree import build
from lightrft.preflight.checks import Finding


def config(**options: Any) -> Config:
    """The options of a run."""
    return build(Config, options)


def only(findings: Iterable[Finding]) -> Finding:
    """The one finding that there is."""
    (found, ) = findings
    return found


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Findings by their name."""
    return {found.name: found for found in findings}
