"""Write the report of a run again: ``lightrft report RUN``."""
import argparse
from collections.abc import Sequence
from pathlib import Path

from lightrft.config.cli import exit_on_config_error
from lightrft.utils.errors import meant_path, UserError
from lightrft.utils.report import write_report

PROG = "lightrft report"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=PROG, description=(__doc__ or "").partition(":")[0] + ": report.html.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, with its metrics.jsonl")
    folder = parser.parse_args(argv).run
    with exit_on_config_error(PROG):
        page = write_report(folder)
        if page is None:
            near = "" if folder.exists() else meant_path(folder)
            raise UserError(f"{folder}: no metrics.jsonl with a step is there{near}; give the --save_path of a run")
    print(page)


if __name__ == "__main__":
    main()
