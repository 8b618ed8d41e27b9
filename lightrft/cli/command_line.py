"""Options of a command that runs something, and what is refused before torch is imported."""
import logging
import os
from collections.abc import Callable, Container, Sequence
from contextvars import ContextVar
from typing import Any

from lightrft.config.cli import exit_on_config_error, parse_config, ParsedConfig
from lightrft.config.layers import with_sources
from lightrft.config.options import ConfigError
from lightrft.config.schema import Config
from lightrft.utils.errors import UserError

_checks = ContextVar("checks", default=False)  # commands end with _Checked in place of their run


class _Checked(Exception):
    """End of a command whose command line has no mistake that is known before torch is imported."""


def check_command(command: Callable[[Sequence[str]], object], words: Sequence[str]) -> None:
    """Refuse what ``command`` would refuse before torch is imported, and run nothing; its ranks log what they read.

    Raises:
        SystemExit: 2 with the problems on stderr.
    """
    token = _checks.set(True)
    logging.disable(logging.WARNING)
    try:
        command(words)
    except _Checked:
        pass
    finally:
        logging.disable(logging.NOTSET)
        _checks.reset(token)


def on_one_machine() -> bool:
    """Return True if all ranks are on this machine. Files may exist on one alone, so ranks on several machines find out
    together, in the session."""
    return os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")


def refuse_early(parsed: ParsedConfig, functions: Container[str] = ()) -> None:
    """Refuse, before torch is imported, options as they are written, reward files and rows that cannot be used.

    Args:
        functions: names of rewards that are functions of this program.

    Raises:
        UserError: with the first kind of these problems.
    """
    _refuse_written(parsed, functions)
    _refuse_rows(parsed)


def _refuse_written(parsed: ParsedConfig, functions: Container[str] = ()) -> None:
    from lightrft.preflight.hardware import Machine
    from lightrft.preflight.shared_rules import known_without_torch
    from lightrft.preflight.written import refuse_as_written  # --help does not wait for these
    ranks = Machine.planned(parsed.plan_gpus).ranks if parsed.plan_gpus else int(os.environ.get("WORLD_SIZE", "1"))
    try:
        refuse_as_written(parsed.config, parsed.provenance, ranks, functions)
    except ConfigError as error:
        together = with_sources([*known_without_torch(parsed.config, ranks)], parsed.provenance)
        raise ConfigError(list(dict.fromkeys([*error.problems, *together]))) from None


def _refuse_rows(parsed: ParsedConfig) -> None:
    from lightrft.preflight.inputs import refuse_rows
    refuse_rows(parsed.config, bool(parsed.plan_gpus))


def _further(parsed: ParsedConfig) -> list[str]:
    """Return what is wrong with the options that could be read; of a command line of another trainer, which has more to
    mend, also what is known only after torch is imported."""
    problems: list[str] = []
    checks = (_refuse_written, _refuse_rows, *([_refuse_settled] if parsed.foreign else []))
    for check in checks if on_one_machine() else ():
        try:
            check(parsed)
        except UserError as error:
            problems += error.problems if isinstance(error, ConfigError) else [str(error)]
    return list(dict.fromkeys(problems))


def _refuse_settled(parsed: ParsedConfig) -> None:
    from lightrft.trainer.session import settled
    settled(parsed)


def _refuse_at_once(parsed: ParsedConfig) -> None:
    """Extend :func:`refuse_early`: one message has all that is wrong with a command line of another trainer."""
    try:
        refuse_early(parsed)
    except UserError:
        if not parsed.foreign:
            raise
        raise ConfigError(_further(parsed)) from None


def parse_command(argv: Sequence[str] | None, prog: str | None, description: str, tree: type = Config,
                  defaults: dict[str, Any] | None = None) -> ParsedConfig:
    """Build the option tree as :func:`lightrft.config.cli.parse_config` does, and :func:`refuse_early`.

    Raises:
        SystemExit: 2 with every such problem on stderr; 0 after ``--help``.
    """
    parsed = parse_config(argv, prog, defaults, description, tree, _further)
    if on_one_machine():
        with exit_on_config_error(prog):
            _refuse_at_once(parsed)
    if _checks.get():
        raise _Checked
    return parsed
