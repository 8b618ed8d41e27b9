"""Command line of a command that runs something: its options, and what is refused before torch is imported."""
import os
from collections.abc import Sequence
from typing import Any

from lightrft.config.cli import exit_on_config_error, parse_config, ParsedConfig
from lightrft.config.schema import Config


def parse_command(argv: Sequence[str] | None, prog: str | None, description: str, tree: type = Config,
                  defaults: dict[str, Any] | None = None) -> ParsedConfig:
    """Build the option tree as :func:`lightrft.config.cli.parse_config` does; refuse what is wrong as it is written.

    Files may exist on one machine alone, so ranks on several machines find out together, in the session.

    Raises:
        SystemExit: 2 with every such problem on stderr; 0 after ``--help``.
    """
    parsed = parse_config(argv, prog, defaults, description, tree)
    if os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE"):
        from lightrft.preflight.written import refuse_as_written  # --help does not wait for it
        with exit_on_config_error(prog):
            refuse_as_written(parsed.config, parsed.provenance)
    return parsed
