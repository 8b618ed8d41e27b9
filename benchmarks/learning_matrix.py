"""Train every recipe on the quickstart task with numbers of five digits: the same warmed-up model, the same steps x
prompts x samples, three seeds.

    python benchmarks/learning_matrix.py --out runs/matrix [--recipes grpo dapo] [--seeds 1 2 3] [--steps 60]
    python benchmarks/learning_matrix.py --out runs/matrix --all --docs

A run is one process with one thread; ``--jobs`` of them run at a time. A finished run is stored in the folder and not
repeated, so an interrupted matrix resumes where it stopped. ``--all`` adds the algorithms that no recipe uses, each put
into the defaults (grpo's advantage, ppo's loss, no KL) by its own flag. Writes ``results.json``, ``results.md`` and
``results.png``; ``--docs`` also puts them into the docs, where runs that are not repeated stay. Exits with 1 and their
names if runs failed, or if recipes do not beat the warmed-up model by 0.1 with every seed.
"""
import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from bare_loop import warm_model  # noqa: E402
from matrix_report import draw_all, publish, single_runs, table, write  # noqa: E402

DIGITS = 5  # with three digits and 128 samples a step all algorithms converge within ten steps and look alike
# two optimizer steps per rollout, so that ratios move; held-out answers are sampled, because greedy ones are right as
# soon as the right carry is the likelier one
COMMON = ("--rollout_batch_size 8 --n_samples_per_prompt 4 --train_batch_size 16 --prompt_max_len 64 "
          "--generate_max_len 96 --actor_learning_rate 5e-5 --lr_scheduler linear --lr_warmup_ratio 0 --reward exact "
          "--eval_at_start --eval_steps 10 --eval_temperature 1 --max_eval_samples 500 --disable_ckpt "
          "--report false").split()
ONE_STEP = "--train_batch_size 32"  # without a ratio the gradient is exact in the first step on a rollout only
SEQUENCE_MEAN = "--loss_agg_mode seq-mean-token-mean"
# what a run needs besides COMMON on this task
SETTINGS: dict[str, str] = {
    "ppo": "--critic_learning_rate 1e-3",
    "rloo": ONE_STEP,
    "remax": ONE_STEP,
    "opo": ONE_STEP,
    "advantage_estimator=reinforce": f"{ONE_STEP} --policy_loss reinforce",
    "advantage_estimator=gpg": f"{ONE_STEP} --policy_loss gpg",
    "advantage_estimator=gdpo": "--reward exact format=0.1",
    "advantage_estimator=grpo_passk": "--pass_k 2",
    "policy_loss=gspo_token": f"--eps_clip 3e-4 --eps_clip_high 4e-4 {SEQUENCE_MEAN}",
    "policy_loss=sapo": SEQUENCE_MEAN,
}
REQUIRED_GAIN = 0.1


class Run(NamedTuple):
    """One training run: a recipe, or ``option=value`` for an algorithm put into the defaults."""
    name: str
    seed: int

    def flags(self, steps: int) -> list[str]:
        """List the flags that decide the result, except the model and the data."""
        option, _, value = self.name.rpartition("=")
        method = [f"--{option or 'recipe'}", value]
        return [*method, *COMMON, *SETTINGS.get(self.name, "").split(), "--seed", str(self.seed), "--max_steps",
                str(steps)]  # yapf: disable

    def file(self, out: Path) -> Path:
        """Path of the stored result."""
        return out / "runs" / f"{self.name.replace('=', '-')}_{self.seed}.json"


def kept(run: Run, out: Path, steps: int) -> dict[str, Any] | None:
    """Return the stored result of an earlier call with the same flags, else None."""
    path = run.file(out)
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found if found and found["flags"] == run.flags(steps) else None


def train(run: Run, out: Path, steps: int, timeout: float) -> dict[str, Any]:
    """Train in a separate process and store the result. A failure is a ``RuntimeError`` with the end of the log."""
    path = run.file(out)
    data, log = out / "warm" / "data", path.with_suffix(".log")
    words = ["--pretrain", str(out / "warm" / "sft" / "hf"), "--prompt_data", str(data / "train.parquet"),
             "--eval_data", str(data / "test.parquet"), *run.flags(steps)]  # yapf: disable
    with tempfile.TemporaryDirectory() as folder, log.open("w", encoding="utf-8") as stream:
        command = [sys.executable, "-m", "lightrft.cli.train", *words, "--save_path", folder]
        seconds, code = cpu_seconds(command, stream, timeout)
        if code:
            reason = f"more than {timeout:.0f} s" if code == -signal.SIGKILL else "its log ends:"
            raise RuntimeError(f"{reason}\n{log.read_text(encoding='utf-8')[-1500:]}")
        text = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8")
    result = summary(run, [json.loads(line) for line in text.splitlines()], seconds)
    path.write_text(json.dumps(result | {"flags": run.flags(steps)}), encoding="utf-8")
    return result | {"flags": run.flags(steps)}


def cpu_seconds(command: list[str], stream: IO[str], timeout: float) -> tuple[float, int]:
    """Run a command; return CPU-seconds with its children, hardly changed by other work, and its exit code."""
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=stream,
                               stderr=stream)
    limit = threading.Timer(timeout, process.kill)
    limit.start()
    _, status, usage = os.wait4(process.pid, 0)
    limit.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime, process.returncode


def summary(run: Run, lines: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Summarize a run. The area is the mean sampled accuracy over the steps, of all generated responses."""
    held_out = [[line["step"], line["eval/all/pass@1"]] for line in lines if "eval/all/pass@1" in line]
    rewards = [[line["step"], round(line.get("reward/generated_mean", line["reward/exact/mean"]), 3)]
               for line in lines if "reward/exact/mean" in line]  # yapf: disable
    return {
        "run": run.name, "seed": run.seed, "area": round(sum(value for _, value in rewards) / len(rewards), 4),
        "start": held_out[0][1], "end": held_out[-1][1], "cpu_seconds": round(seconds, 1),
        "tokens": round(sum(line.get("rollout/tokens", 0) for line in lines)), "rewards": rewards, "held_out": held_out
    }  # yapf: disable


def warm_up(out: Path, warm: Path | None) -> None:
    """Provide the model that all runs start from, in ``out``: train it there, or link it."""
    folder = out / "warm"
    if warm and not folder.exists():
        folder.symlink_to(warm.resolve())
    if not (folder / "sft" / "hf" / "config.json").exists():
        print("warming up the model", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        warm_model(folder, DIGITS)


def train_all(runs: list[Run], args: argparse.Namespace) -> list[str]:
    """Train the missing runs, ``args.jobs`` at a time, with progress; return the runs that failed."""
    todo = [run for run in runs if not kept(run, args.out, args.steps)]
    print(f"{len(runs)} runs, {len(runs) - len(todo)} of them finished before", flush=True)
    start, failed = time.perf_counter(), []
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(train, run, args.out, args.steps, args.timeout): run for run in todo}
        try:
            for number, future in enumerate(as_completed(waiting), 1):
                left = (time.perf_counter() - start) / number * (len(todo) - number)
                run = waiting[future]
                if error := future.exception():
                    failed.append(f"{run.name} (seed {run.seed})")
                    print(f"{run.name} seed {run.seed} failed: {error}", file=sys.stderr)
                text = "failed" if error else "{start:.3f} -> {end:.3f}, area {area:.3f}, {cpu_seconds:.0f} s".format(
                    **future.result())
                print(f"[{number}/{len(todo)}] {run.name} seed {run.seed}: {text}; {left / 60:.0f} min left",
                      flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def report(runs: list[Run], args: argparse.Namespace) -> list[str]:
    """Write results, table and picture; return the recipes that gain too little."""
    results = [found for run in runs if (found := kept(run, args.out, args.steps))]
    write(results, args.out / "results.json")
    (args.out / "results.md").write_text(table(results), encoding="utf-8")
    draw_all(results, args.out / "results.png")
    if args.docs and results:
        publish(results)
    print(table(results))
    weak = {found["run"] for found in results if found["end"] - found["start"] < REQUIRED_GAIN}
    return sorted(name for name in weak if "=" not in name)


def main() -> None:
    """Run the benchmark from the command line."""
    from lightrft.config.presets import RECIPES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "matrix", help="folder of the matrix")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES),
                        help="recipes, or option=value such as policy_loss=sapo (default: every recipe)")
    parser.add_argument("--all", action="store_true", help="also every algorithm that no recipe uses")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds of prompt order and sampling")
    parser.add_argument("--steps", type=int, default=60, help="steps of 8 prompts x 4 samples")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each one process with one thread")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that one run may take")
    parser.add_argument("--warm", type=Path, help="folder with a warmed-up model (sft/hf) and its prompts (data)")
    parser.add_argument("--docs", action="store_true", help="put the results into the docs as well")
    args = parser.parse_args()
    args.out = args.out.resolve()
    (args.out / "runs").mkdir(parents=True, exist_ok=True)
    warm_up(args.out, args.warm)
    names = args.recipes + (single_runs() if args.all else [])
    runs = [Run(name, seed) for name in names for seed in args.seeds]
    failed = train_all(runs, args)
    weak = report(runs, args)
    for text, found in (("failed", failed), (f"gained less than {REQUIRED_GAIN}", weak)):
        if found:
            print(f"{text}: {', '.join(found)}", file=sys.stderr)
    sys.exit(bool(failed or weak))


if __name__ == "__main__":
    main()
