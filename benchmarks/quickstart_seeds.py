"""Run a quickstart on several seeds: held-out accuracy before and after, and the time it takes after the install.

    python benchmarks/quickstart_seeds.py [--example quickstart_vl] [--seeds 42 1 2] [--keep FOLDER] \\
        [-- --advantage_estimator rloo ...]
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(example: str, seed: int, folder: Path, flags: list[str]) -> str:
    """Run one quickstart; return a row of the table."""
    start = time.perf_counter()
    env = os.environ | {"OUT": str(folder), "PYTHON": sys.executable}
    done = subprocess.run(["bash", f"examples/{example}/run_{example}.sh", "--seed",
                           str(seed), *flags], cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"seed {seed} failed:\n{done.stderr[-4000:]}")
    seconds = time.perf_counter() - start
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = {line["step"]: line["eval/all/pass@1"] for line in lines if "eval/all/pass@1" in line}
    first, last = min(held_out), max(held_out)
    reached = next((step for step, value in sorted(held_out.items()) if value >= 0.95), None)
    return f"| {seed} | {held_out[first]:.3f} | {held_out[last]:.3f} | {reached} | {seconds:.0f} s |"


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--example", default="quickstart", choices=["quickstart", "quickstart_vl", "quickstart_audio"],
                        help="folder of the example")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2], help="seeds of data, model and sampling")
    parser.add_argument("--keep", type=Path, help="keep the runs here")
    args, flags = parser.parse_known_args()
    flags = [flag for flag in flags if flag != "--"]
    print("| seed | held-out accuracy before | after | first evaluation at 0.95 or more (step) | everything |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for seed in args.seeds:
            print(run(args.example, seed, (args.keep or Path(scratch)) / f"seed_{seed}", flags), flush=True)


if __name__ == "__main__":
    main()
