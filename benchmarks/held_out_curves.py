"""Draw the held-out accuracy of several runs into one picture.

    python benchmarks/held_out_curves.py PICTURE.png "NAME=FOLDER" ...
"""
import argparse
import json
from pathlib import Path

METRIC = "eval/all/pass@1"


def held_out(folder: Path) -> dict[int, float]:
    """Return the held-out accuracy of a run, by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[METRIC] for line in lines if METRIC in line}


def draw(runs: dict[str, dict[int, float]], picture: Path) -> None:
    """Draw one line per run."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for number, (name, curve) in enumerate(runs.items()):
        axes.plot(list(curve), list(curve.values()), label=name, linestyle=("-", "--")[number % 2])
    axes.axhline(0.95, color="grey", linewidth=0.7)
    axes.set(xlabel="step", ylabel="held-out accuracy", ylim=(0.25, 1.02))
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(picture)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("runs", nargs="+", help="name of a line, =, folder of its run")
    args = parser.parse_args()
    named = dict(run.split("=", 1) for run in args.runs)
    draw({name: held_out(Path(folder)) for name, folder in named.items()}, args.picture)


if __name__ == "__main__":
    main()
