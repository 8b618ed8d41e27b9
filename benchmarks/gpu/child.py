"""One measurement in this process: calls its function and writes the rows as JSON.

    python -m benchmarks.gpu.child --function NAME --setting JSON --out FILE
"""
import argparse
import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.catalog import Setting


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; of several ranks the first writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--function", required=True, help="module:name; the module in this package, or a dotted one")
    parser.add_argument("--setting", required=True, type=json.loads, help="fields of Setting, as JSON")
    parser.add_argument("--out", required=True, type=Path, help="file that gets the rows")
    args = parser.parse_args(argv)
    module, name = args.function.split(":")
    found = importlib.import_module(module if "." in module else f"benchmarks.gpu.{module}")
    tables = getattr(found, name)(Setting(**args.setting))
    if os.environ.get("RANK", "0") == "0":
        args.out.write_text(json.dumps(tables), encoding="utf-8")


if __name__ == "__main__":
    main()
