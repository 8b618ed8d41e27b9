"""Train the quickstarts on several seeds, as they are and in other ways: held-out accuracy, and the time they take.

    python benchmarks/quickstart_seeds.py [--seeds 42 1 2] [--out runs/seeds] [--record docs/data/quickstart_seeds.json]
    python benchmarks/quickstart_seeds.py --examples quickstart_vl quickstart_audio --ways plain frozen lora vllm --docs

``plain`` is the script of an example with its defaults. The other ways start from the warmed-up model of that run, on
one process; ``NAME=FLAGS`` is a way of your own. A finished run is not repeated, so an interrupted call resumes where
it stopped. Prints a table; ``--docs`` puts it, its data and the pictures into the docs.
"""
import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from learning_matrix import cpu_seconds  # noqa: E402
from matrix_report import band, by_run, draw_all, Outputs, Results, replace_section, write  # noqa: E402
from peers import machine  # noqa: E402

TOWERS = {"quickstart": "", "quickstart_vl": "visual", "quickstart_audio":
          "audio"}  # by example, the part that is frozen
WAYS = {
    "plain": "",
    "frozen": "--freeze_prefix {tower} --max_steps 120",  # it keeps what careless demonstrations taught it: slower
    "lora": "--lora_rank 16 --actor_learning_rate 4e-3 --target_modules all-linear {tower} projector",
    "vllm": "--engine_type vllm",
}
REFUSED = {("quickstart", "frozen"), ("quickstart", "lora")}  # no tower, and no row of their own
AIM, METRIC = 0.95, "eval/all/pass@1"
START, END = "<!-- media curves -->", "<!-- /media curves -->"
OUTPUTS = Outputs(ROOT / "docs" / "data" / "media_curves.json", ROOT / "docs" / "modalities.md",
                  ROOT / "docs" / "images" / "media_curves.png")
PLAIN = ROOT / "docs" / "images" / "quickstart_media.png"  # the runs without other flags alone
HEADER = ("| run | seeds | held-out before | after | first evaluation at 0.95 or more (step) | CPU s |\n"
          "|---|---|---|---|---|---|\n")


class Run(NamedTuple):
    """One run of an example."""
    example: str
    way: str
    seed: int

    @property
    def name(self) -> str:
        """Name in tables and pictures."""
        way = self.way.partition("=")[0]
        return self.example if way == "plain" else f"{self.example} {way}"

    def flags(self) -> list[str]:
        """List the flags that are given to the trainer of the example."""
        _, given, own = self.way.partition("=")
        text = own if given else WAYS[self.way].format(tower=TOWERS[self.example])
        return ["--seed", str(self.seed), *text.split()]

    def folder(self, out: Path) -> Path:
        """Folder of the run."""
        return out / f"{self.name.replace(' ', '_')}_{self.seed}"

    def command(self, out: Path) -> list[str]:
        """Compose the command line."""
        if self.way == "plain":
            return ["bash", f"examples/{self.example}/run_{self.example}.sh", *self.flags()]
        whole = Run(self.example, "plain", self.seed).folder(out)
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
                f"examples/{self.example}/train_colocate.py", "--pretrain", f"{whole}/sft/hf", "--prompt_data",
                f"{whole}/data/train.parquet", "--eval_data", f"{whole}/data/test.parquet", "--save_path",
                str(self.folder(out)), "--disable_ckpt", "--report", "false", *self.flags()]  # yapf: disable


def kept(run: Run, out: Path) -> dict[str, Any] | None:
    """Return the stored result of an earlier call with the same flags, else None."""
    path = run.folder(out) / "result.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found if found and found["flags"] == run.flags() else None


def train(run: Run, out: Path, timeout: float) -> dict[str, Any]:
    """Run one example and store its result; a failure ends the program with the end of the log."""
    folder = run.folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    log, start = folder / "log.txt", time.perf_counter()
    os.environ.update(OUT=str(folder), PYTHON=sys.executable, TOKENIZERS_PARALLELISM="false")
    with log.open("w", encoding="utf-8") as stream:
        used, code = cpu_seconds(run.command(out), stream, timeout)
    if code:
        sys.exit(f"{run.name} seed {run.seed} failed:\n{log.read_text(encoding='utf-8')[-4000:]}")
    result = summary(run, folder, used, time.perf_counter() - start)
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return result


def summary(run: Run, folder: Path, used: float, seconds: float) -> dict[str, Any]:
    """Summarize a finished run; ``used`` are its CPU-seconds, ``seconds`` those of a clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    held_out = [[line["step"], line[METRIC]] for line in lines if METRIC in line]
    return {"run": run.name, "seed": run.seed, "flags": run.flags(), "start": held_out[0][1], "end": held_out[-1][1],
            "reached": next((step for step, value in held_out if value >= AIM), None), "cpu_seconds": round(used),
            "seconds": round(seconds), "held_out": held_out}  # yapf: disable


def table(results: Results) -> str:
    """Render Markdown, one row per run over its seeds."""
    return HEADER + "".join(map(row, by_run(results).values()))


def row(seeds: Results) -> str:
    """Render one run of the table."""
    before, after = (band([seed[key] for seed in seeds]) for key in ("start", "end"))
    reached = ", ".join(str(seed["reached"] or "none") for seed in seeds)
    used = ", ".join(f"{seed['cpu_seconds']}" for seed in seeds)
    numbers = ", ".join(f"{seed['seed']}" for seed in seeds)
    return f"| `{seeds[0]['run']}` | {numbers} | {before} | {after} | {reached} | {used} |\n"


def section(results: Results) -> str:
    """Render the text between the marks of the page."""
    picture = "![held-out accuracy over the steps, a panel per run](images/media_curves.png)"
    return f"\n{table(results)}\n{picture}\n"


def publish(results: Results) -> None:
    """Write data, table and pictures into the docs; runs that were not repeated stay."""
    old = json.loads(OUTPUTS.data.read_text(encoding="utf-8")) if OUTPUTS.data.exists() else []
    merged = {(result["run"], result["seed"]): result for result in [*old, *results] if result["run"] != "quickstart"}
    order = sorted(merged.values(), key=lambda each:
                   (not each["run"].startswith("quickstart_vl"), each["run"], each["seed"]))
    order = [{key: value for key, value in each.items() if key != "seconds"} for each in order]  # of a shared machine
    write(order, OUTPUTS.data)
    replace_section(OUTPUTS.page, START, END, section(order))
    draw_all(order, OUTPUTS.picture, aim=AIM)
    draw_all([result for result in order if " " not in result["run"]], PLAIN, (3.2, 2.2), AIM)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", nargs="+", default=["quickstart"], choices=list(TOWERS),
                        help="folders of the examples")
    parser.add_argument("--ways", nargs="+", default=["plain"],
                        help=f"{', '.join(WAYS)}, or NAME=FLAGS; ways that an example has not are left out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2], help="seeds of data, model and sampling")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "seeds", help="folder of the runs")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one run may take")
    parser.add_argument("--record", type=Path, help="JSON file of the results, with the machine")
    parser.add_argument("--docs", action="store_true", help="put the results into the docs as well")
    args = parser.parse_args()
    out, results = args.out.resolve(), []
    runs = [Run(example, way, seed) for way in args.ways for example in args.examples for seed in args.seeds
            if (example, way) not in REFUSED]  # yapf: disable
    for run in runs:
        results.append(kept(run, out) or train(run, out, args.timeout))
        print(
            "{run} seed {seed}: {start:.3f} -> {end:.3f}, 0.95 after step {reached}, {cpu_seconds} CPU s, {seconds} s".
            format(**results[-1]), flush=True)
    if args.docs:
        publish(results)
    if args.record:
        args.record.write_text(json.dumps(machine() | {"runs": results}, indent=1) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
