"""Break down a step of the quickstart: seconds and share per phase, tokens/s and peak memory.

    python benchmarks/step_anatomy.py [--steps 38] [--ranks 1 2]

Makes the quickstart's data and warmed-up model in a temporary folder, runs the quickstart's own script (rewards in
worker processes, rollouts, TensorBoard and checkpoints included; evaluations not counted) and reads its metrics.jsonl.
Generation, forward, backward and optimizer are the work; the last line is everything else: its limit is 10 %.
"""
import argparse
import statistics
import tempfile
from pathlib import Path

from bare_loop import trainer_metrics, warm_model

WORK = ("rollout", "old_logprobs", "ref", "values", "forward", "backward", "optimizer")
ASIDE = ("update", "step", "eval")  # sums of other phases, and evaluation, which belongs to no training step


def phase_seconds(lines: list[dict]) -> dict[str, float]:
    """Compute the mean seconds of each phase over the steps; the phases are exclusive and add up to the step."""
    names = sorted({key[5:-2] for line in lines for key in line if key.startswith("time/")} - set(ASIDE))
    return {name: statistics.fmean(line.get(f"time/{name}_s", 0.0) for line in lines) for name in names}


def table(lines: list[dict], ranks: int) -> str:
    """Render Markdown: one row per phase, then the sums."""
    seconds = phase_seconds(lines)
    total = sum(seconds.values())
    rest = sum(value for name, value in seconds.items() if name not in WORK)
    rows = [f"| {name} | {value * 1e3:.1f} | {value / total:.1%} |" for name, value in seconds.items() if value > 5e-5]
    speed = sum(line["rollout/tokens"] for line in lines) / (total * len(lines))
    memory = max(line["perf/peak_mem_gib"] for line in lines)
    return "\n".join([
        f"### {ranks} rank{'s, FSDP2' if ranks > 1 else ', one process'}", "", "| phase | ms | share |",
        "|---|---|---|", *rows, f"| **step** | {total * 1e3:.1f} | 100 % |",
        f"| **all but generation, forward, backward, optimizer** | {rest * 1e3:.1f} | {rest / total:.1%} |", "",
        f"{speed:.0f} tokens/s, peak memory {memory:.2f} GiB per rank, means of {len(lines)} steps", ""
    ])


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=38, help="measured steps; two more warm up")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, data = warm_model(Path(folder))
        for ranks in args.ranks:
            flags = ["--eval_data", data, "--max_eval_samples", "16", "--strategy", "fsdp" if ranks > 1 else "single"]
            lines = trainer_metrics(model, data, args.steps, ranks, ["examples/quickstart/train_colocate.py"], flags)
            print(table(lines, ranks))


if __name__ == "__main__":
    main()
