"""One measurement in this process: calls its function and writes its tables as JSON, whenever they have grown.

    python -m benchmarks.gpu.child --function NAME --setting JSON --out FILE
"""
import argparse
import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.catalog import Setting
from benchmarks.gpu.store import Tables


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; of several ranks the first writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--function", required=True, help="module:name; the module in this package, or a dotted one")
    parser.add_argument("--setting", required=True, type=json.loads, help="fields of Setting, as JSON")
    parser.add_argument("--out", required=True, type=Path, help="file that gets the rows")
    args = parser.parse_args(argv)
    if Setting(**args.setting).expandable:  # torch, which is imported below, reads it once
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    module, name = args.function.split(":")
    measurement = importlib.import_module(module if "." in module else f"benchmarks.gpu.{module}")
    tables: Tables = {}
    for rows in getattr(measurement, name)(Setting(**args.setting)):
        tables |= rows
        if os.environ.get("RANK", "0") == "0":
            write(tables, args.out)


def write(tables: Tables, out: Path) -> None:
    """Write the tables; a process that is killed meanwhile leaves the old ones."""
    new = out.with_suffix(".new")
    new.write_text(json.dumps(tables), encoding="utf-8")
    new.replace(out)


if __name__ == "__main__":
    main()
