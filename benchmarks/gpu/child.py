"""One measurement in this process: calls its function and writes the rows as JSON.

    python -m benchmarks.gpu.child FUNCTION SETTING OUT
"""
import argparse
import importlib
import json
import os
from pathlib import Path

from benchmarks.gpu.catalog import Setting


def main() -> None:
    """Run the command line; of several ranks the first writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("function", help="module:name; the module in this package, or a dotted one")
    parser.add_argument("setting", type=json.loads, help="fields of Setting, as JSON")
    parser.add_argument("out", type=Path, help="file that gets the rows")
    args = parser.parse_args()
    module, name = args.function.split(":")
    found = importlib.import_module(module if "." in module else f"benchmarks.gpu.{module}")
    tables = getattr(found, name)(Setting(**args.setting))
    if os.environ.get("RANK", "0") == "0":
        args.out.write_text(json.dumps(tables), encoding="utf-8")


if __name__ == "__main__":
    main()
