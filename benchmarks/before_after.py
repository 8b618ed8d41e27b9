"""Compare the CPU seconds per generated token of two commits, in turn in one run.

    python benchmarks/before_after.py OLD [NEW] [--pairs 3] [--cases equal ragged] [--out FILE]

The cases are those of peers.py (this trainer alone), of hf_engine.py (the engine alone) and of bare_loop.py (the
command alone, in one process and on two FSDP2 ranks), with one thread per process. CPU seconds are user and system time
of all processes of a case, without start and warm-up.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryDirectory

import peers
from bare_loop import FLAGS, trainer_metrics
from same_numbers import checkout

Seconds = dict[str, float]  # "cpu_s" and "tokens" of the measured steps
STEPS, ROWS, PROMPT = 10, 64, 128  # of the command; memory and prompt of the engine, as in hf_engine.py
PROMPTS = {"quickstart": 16, "hidden 256": 4}  # of the engine, times 8 samples


def peer(side: str, case: str, tree: Path, home: Path) -> Iterator[Seconds]:
    """Measure a case of peers.py again and again."""
    folder, data = home / peers.CASES[case].model, home / "data" / "train.parquet"
    while True:
        yield child(tree, [f"{tree}/benchmarks/peers.py", "--child", side, case, str(folder), str(data)])


def engine(model: str, lengths: str, tree: Path, home: Path) -> Iterator[Seconds]:
    """Measure a case of hf_engine.py again and again, in one process that waits in between."""
    own = tree / "benchmarks" / "before_after.py"  # which calls the engine as its tree does
    command = [sys.executable, "-W", "ignore", str(own), "_engine", model, lengths]
    with subprocess.Popen(command, env=environ(tree), stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin and process.stdout
        try:
            while True:
                print(file=process.stdin, flush=True)
                yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()


def trainer(ranks: int, tree: Path, home: Path) -> Iterator[Seconds]:
    """Measure the command of bare_loop.py again and again."""
    while True:
        yield child(tree, [__file__, "_trainer", str(ranks), str(home)])


CASES: dict[str, Callable[[Path, Path], Iterator[Seconds]]] = {
    "equal": partial(peer, "lightrft", "equal"),
    "equal, default": partial(peer, "lightrft, default", "equal"),
    "ragged": partial(peer, "lightrft", "ragged"),
    "engine, 136k parameters, natural": partial(engine, "quickstart", "natural"),
    "engine, 136k parameters, equal": partial(engine, "quickstart", "equal"),
    "engine, hidden 256, natural": partial(engine, "hidden 256", "natural"),
    "engine, hidden 256, equal": partial(engine, "hidden 256", "equal"),
    "command, 1 process": partial(trainer, 1),
    "command, 2 ranks FSDP2": partial(trainer, 2),
}  # yapf: disable


def environ(tree: Path) -> dict[str, str]:
    """Return the environment in which Python imports ``tree``."""
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                         "HF_HUB_OFFLINE": "1"}  # yapf: disable


def child(tree: Path, words: list[str]) -> Seconds:
    """Run Python on ``tree``; return the JSON of its last line."""
    done = subprocess.run([sys.executable, "-W", "ignore", *words], env=environ(tree), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} on {tree} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_engine(model: str, lengths: str) -> None:
    """Run the HF engine of the tree that is imported once per line of the standard input; print what it took."""
    import hf_engine
    import torch
    torch.set_num_threads(1)
    size, end = hf_engine.SIZES[model], hf_engine.END if lengths == "natural" else None
    new = hf_engine.LONGEST if lengths == "natural" else hf_engine.LONGEST // 2
    kv_bytes = ROWS * (PROMPT + new - 1) * 2 * 4 * size["num_hidden_layers"] * size["hidden_size"]
    policy, requests = hf_engine.counting_model(size), hf_engine.random_prompts(PROMPT)
    hf_engine.run_engine(policy, requests[:2], kv_bytes, 4, end)  # warm up
    for _ in sys.stdin:
        start = time.process_time()
        tokens = sum(hf_engine.run_engine(policy, requests[:PROMPTS[model]], kv_bytes, new, end))
        print(json.dumps({"cpu_s": time.process_time() - start, "tokens": tokens}), flush=True)


def measure_trainer(ranks: str, home: str) -> None:
    """Run the command of bare_loop.py on the tree that is imported."""
    model, data = f"{home}/sft/hf", f"{home}/data/train.parquet"
    lines = trainer_metrics(model, data, STEPS + 1, int(ranks), [__file__, "_run"], FLAGS)
    tokens = sum(line["rollout/tokens"] for line in lines[1:])
    print(json.dumps({"cpu_s": lines[-1]["cpu_s"] - lines[0]["cpu_s"], "tokens": tokens}))


def run_trainer(words: list[str]) -> None:
    """Run the command ``train``; the metrics of a step have the CPU seconds so far, of all ranks and their children."""
    import psutil

    from lightrft.cli.train import main as train
    from lightrft.trainer.ppo_trainer import PPOTrainer
    end_step, launcher = PPOTrainer._end_step, psutil.Process().parent()

    def counted(self: PPOTrainer, metrics: dict[str, float]) -> None:
        used = [process.cpu_times() for process in launcher.children(recursive=True)]
        metrics["cpu_s"] = sum(each.user + each.system for each in used)
        end_step(self, metrics)

    PPOTrainer._end_step = counted  # type: ignore[method-assign]
    train(words)


def compare(trees: dict[str, Path], home: Path, case: str, pairs: int) -> dict[str, list[Seconds]]:
    """Run both trees in turn, ``pairs`` times, the other one first each time; return the results of each."""
    runs = {name: CASES[case](tree, home) for name, tree in trees.items()}
    results: dict[str, list[Seconds]] = {name: [] for name in trees}
    for pair in range(pairs):
        for name in sorted(trees, reverse=bool(pair % 2)):
            results[name].append(next(runs[name]))
    return results


def row(case: str, results: dict[str, list[Seconds]]) -> str:
    """Render a case: pairs, microseconds of CPU per token (medians), and their ratio (median, least and most)."""
    before, after = ([1e6 * run["cpu_s"] / run["tokens"] for run in results[name]] for name in ("before", "after"))
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    old, new, ratio = map(statistics.median, (before, after, ratios))
    span = f"({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {case} | {len(ratios)} | {old:.1f} | {new:.1f} | {ratio:.2f} {span} |"


def main() -> None:
    """Print the table; write all results as JSON with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="commit")
    parser.add_argument("new", nargs="?", default=".", help="commit (default: the working tree)")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each commit, in turn")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--home", type=Path, help="folder of the models and the data (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="JSON file of all results")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        peers.prepare_models(home := args.home or Path(folder), ["ragged"])
        with checkout(args.old, Path(folder) / "before") as before, checkout(args.new, Path(folder) / "after") as after:
            report(args, {"before": before, "after": after}, home)


def report(args: argparse.Namespace, trees: dict[str, Path], home: Path) -> None:
    """Measure the cases; print their rows and write their results as they come."""
    print("| case | pairs | before, us / token | after, us / token | ratio |\n|---|---|---|---|---|", flush=True)
    results, runs = peers.machine() | {"old": args.old, "new": args.new}, {}
    for case in args.cases:
        runs[case] = compare(trees, home, case, args.pairs)
        print(row(case, runs[case]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(results | {"runs": runs}, indent=1) + "\n")


CHILDREN: dict[str, Callable[..., None]] = {"_engine": measure_engine, "_trainer": measure_trainer}

if __name__ == "__main__":
    mode, *words = sys.argv[1:] or [""]
    if mode == "_run":
        run_trainer(words)
    else:
        CHILDREN.get(mode, lambda *words: main())(*words)
