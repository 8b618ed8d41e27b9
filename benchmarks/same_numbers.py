"""Compare the numbers of two commits one by one: metrics, final weights and rollouts of short runs.

    python benchmarks/same_numbers.py OLD NEW                 # two commits, or . for the working tree
    python benchmarks/same_numbers.py OLD . --only dapo lora
    python benchmarks/same_numbers.py OLD NEW --first_step 1e-5   # other kernels: later steps only amplify rounding

Each commit is checked out in a folder and runs the quickstart's models (made and warmed up once, by OLD) on the
quickstart's data, 20 steps per scenario: reinforcement, also with pictures and with an environment of three turns, and
training on fixed rows. One process must agree bitwise; two ranks and vLLM to 1e-6. Compared are the metrics of OLD,
without times and memory, the final weights, and the rollouts.
"""
import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Iterator

import pyarrow.parquet as pq
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
TIMES = ("time/", "perf/", "rollout/tokens_per_s", "time")
RL = {
    "pretrain": "{home}/sft/hf", "prompt_data": "{home}/data/train.parquet", "eval_data": "{home}/data/test.parquet",
    "rollout_batch_size": 8, "n_samples_per_prompt": 4, "train_batch_size": 16, "max_steps": 20, "eval_steps": 20,
    "max_eval_samples": 64, "save_steps": 10, "num_trajectories_to_save": 0, "logging_steps": 20, "print_samples": 0,
    "use_tensorboard": "false", "strategy": "auto"
}  # yapf: disable
PICTURES = RL | {
    "pretrain": "{home}/vl/sft/hf", "prompt_data": "{home}/vl/data/train.parquet",
    "eval_data": "{home}/vl/data/test.parquet"
}  # yapf: disable
TURNS = RL | {
    "reward": "examples/quickstart/reward.py:accuracy", "generate_max_len": 64, "save_trajectories": "true"
}  # yapf: disable
ROWS = {
    "pretrain": "{home}/sft/hf", "train_data": "{home}/data/sft.parquet", "max_len": 64, "train_batch_size": 16,
    "micro_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 20, "logging_steps": 1, "save_steps": 10,
    "use_tensorboard": "false", "strategy": "auto"
}  # yapf: disable
PAIRS = ROWS | {"train_data": "{home}/data/pairs.jsonl"}


@dataclass(frozen=True)
class Scenario:
    """Options of a run beside those of its kind, and the largest allowed difference of its numbers.

    ``program`` are the words of the program; one that lies in ``benchmarks`` is that of this tree for both commits.
    """
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    within: float = 0.0
    resumes: bool = False  # the second half is computed again, from a checkpoint
    kind: dict[str, Any] = field(default_factory=lambda: RL)
    program: tuple[str, ...] = ("examples/quickstart/train_colocate.py", )


def trainer(name: str, kind: dict[str, Any], options: dict[str, Any] | None = None, **rest: Any) -> Scenario:
    """Make the scenario of a trainer of fixed rows."""
    return Scenario(options or {}, kind=kind, program=("-m", f"lightrft.cli.train_{name}"), **rest)


SCENARIOS = {
    "quickstart": Scenario({"rollout_batch_size": 16, "n_samples_per_prompt": 8, "train_batch_size": 128}),
    "ppo": Scenario({"recipe": "ppo", "critic_learning_rate": 1e-3}),
    "dapo": Scenario({"recipe": "dapo", "overlong_buffer_len": 8}),
    "gspo": Scenario({"recipe": "gspo", "rollout_correction": "tis", "top_p": 0.9}),
    "remax": Scenario({"recipe": "remax", "train_batch_size": 32}),
    "kl": Scenario({"recipe": "grpo", "max_epochs": 2, "entropy_coef": 1e-3, "mask_truncated": "true"}),
    "lora": Scenario({"lora_rank": 4, "actor_learning_rate": 3e-3}),
    "oversample": Scenario({"oversample": 1.5}),
    "resume": Scenario({}, resumes=True),
    "pictures": Scenario(kind=PICTURES, program=("examples/quickstart_vl/train_colocate.py", )),
    "turns": Scenario(kind=TURNS, program=(str(ROOT / "benchmarks/three_turns.py"), )),
    "sft": trainer("sft", ROWS),
    "dpo": trainer("dpo", PAIRS, {"beta": 0.5, "nll_loss_coef": 0.1}),
    "rm": trainer("rm", PAIRS),
    "resume_sft": trainer("sft", ROWS, resumes=True),
    "ranks": Scenario({"recipe": "grpo"}, ranks=2, within=1e-6),
    "hsdp": Scenario({"recipe": "grpo", "fsdp_shard_size": 1}, ranks=2, within=1e-6),
    "zero": Scenario({"recipe": "grpo", "strategy": "deepspeed", "zero_stage": 3}, ranks=2, within=1e-6),
    "ranks_dpo": trainer("dpo", PAIRS, ranks=2, within=1e-6),
    "vllm": Scenario({"engine_type": "vllm", "max_steps": 5, "save_steps": 5}, within=1e-6),
}  # yapf: disable


@contextmanager
def checkout(commit: str, folder: Path) -> Iterator[Path]:
    """Check out ``commit`` in ``folder`` and yield its tree; the working tree for ``.``."""
    if commit == ".":
        yield ROOT
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(folder), commit], check=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def execute(tree: Path, words: list[str], log: Path) -> None:
    """Run Python on ``tree``; its output goes to ``log``.

    Raises:
        RuntimeError: with the end of the log.
    """
    environ = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                            "VLLM_CPU_KVCACHE_SPACE": "1"}  # yapf: disable
    with log.open("a") as out:
        code = subprocess.run([sys.executable, *words], cwd=tree, env=environ, stdout=out, stderr=out).returncode
    if code:
        raise RuntimeError(f"{' '.join(words)}\n{log.read_text()[-3000:]}")


def prepare(tree: Path, home: Path) -> None:
    """Make the data of all scenarios and models with a short warm-up, in ``home``."""
    warm_up(tree, home, "quickstart", {"learning_rate": 3e-3, "max_steps": 400})
    warm_up(tree, home / "vl", "quickstart_vl", {"learning_rate": 3e-3, "max_steps": 60})
    rows = pq.read_table(home / "data" / "train.parquet").to_pylist()[:400]
    with (home / "data" / "pairs.jsonl").open("w") as file:
        file.writelines(json.dumps(pair_of(row)) + "\n" for row in rows)


def warm_up(tree: Path, home: Path, example: str, options: dict[str, Any]) -> None:
    """Make the data and the model of an example and train the model on demonstrations, in ``home``."""
    home.mkdir(exist_ok=True)
    execute(tree, [f"examples/{example}/prepare.py", "--out", str(home), "--seed", "42"], home / "log")
    execute(tree, ["-m", "lightrft.cli.train_sft", *as_words({
        "pretrain": f"{home}/base", "train_data": f"{home}/data/sft.parquet", "save_path": f"{home}/sft",
        "train_batch_size": 32, "max_len": 64, "logging_steps": 200} | options), "--disable_ckpt"],
        home / "log")  # yapf: disable


def pair_of(row: dict[str, Any]) -> dict[str, Any]:
    """Make a pair of the right answer to a prompt and a wrong one."""
    answer = int(row["reward_model"]["ground_truth"])
    return {"prompt": row["prompt"], "chosen": f"\\boxed{{{answer}}}", "rejected": f"\\boxed{{{answer + 1}}}"}


def as_words(options: dict[str, Any]) -> list[str]:
    """Write options as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def words_of(scenario: Scenario, home: Path | str, save: Path | str) -> list[str]:
    """Return the command of a scenario, without the interpreter."""
    options = {name: str(value).format(home=home) for name, value in (scenario.kind | scenario.options).items()}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={scenario.ranks}"]
    return [*(launcher if scenario.ranks > 1 else []), *scenario.program,
            *as_words(options | {"save_path": str(save)})]  # yapf: disable


def run(tree: Path, home: Path, scenario: Scenario, save: Path) -> None:
    """Run one scenario, into ``save``."""
    save.mkdir(parents=True)
    words = words_of(scenario, home, save)
    execute(tree, words, save / "log")
    if scenario.resumes:  # once more from the checkpoint in the middle
        shutil.rmtree(save / "checkpoints" / "step_000020")
        execute(tree, [*words, "--load_checkpoint"], save / "log")


def metrics(save: Path) -> list[dict[str, Any]]:
    """Read the lines of ``metrics.jsonl`` without times."""
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(TIMES)} for line in lines]


def rollouts(save: Path) -> list[list[dict[str, Any]]]:
    """Read the samples of each step that wrote a file of rollouts."""
    files = (save / "rollouts").glob("step_*.jsonl")
    return [[json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(files, key=lambda path: int(path.stem.rpartition("_")[2]))]


def gap(left: Any, right: Any) -> float:
    """Compute the difference of two values, relative above 1; infinite for other values that are not equal.

    Of dicts and lists it is the largest one of their values; a key that only the right dict has does not count.
    """
    if isinstance(left, dict) and isinstance(right, dict):
        return max((gap(value, right.get(key, "absent")) for key, value in left.items()), default=0.0)
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return max(map(gap, left, right), default=0.0)
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return 0.0 if left == right or left != left and right != right else abs(left - right) / max(1.0, abs(left))
    return 0.0 if left == right else math.inf


def compare(old: Path, new: Path) -> dict[str, float]:
    """Compute the largest differences of the metrics (of the evaluation before and of step 1, and of all steps), the
    weights and the rollouts."""
    before, after = metrics(old), metrics(new)
    weights, others = (load_file(save / "hf" / "model.safetensors") for save in (old, new))
    apart = [(weights[name] - others[name]).abs().max().item()
             for name in weights] if set(weights) == set(others) else []
    return {
        "step 1": gap(before[:2], after[:2]), "all steps": gap(before, after),
        "weights": max(apart, default=math.inf), "rollouts": gap(rollouts(old), rollouts(new))
    }  # yapf: disable


def fits(found: dict[str, float], scenario: Scenario, first_step: float | None) -> bool:
    """Return True if the differences are within the scenario's limit, or those of step 1 within ``first_step``."""
    return max(found.values()) <= scenario.within if first_step is None else found["step 1"] <= first_step


def main() -> int:
    """Print a row per scenario; return 1 if numbers differ by more than allowed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", metavar="OLD", help="commit")
    parser.add_argument("new", metavar="NEW", help="commit")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--first_step", type=float, metavar="LIMIT",
                        help="only step 1 must agree, within this: the commits compute with other kernels")
    args = parser.parse_args()
    bad = 0
    print("| scenario | step 1 | all steps | weights | rollouts | |\n|---|---|---|---|---|---|", flush=True)
    with ExitStack() as stack:
        work = stack.enter_context(TemporaryDirectory())
        old, new = (stack.enter_context(checkout(commit, Path(work, side)))
                    for side, commit in (("old", args.old), ("new", args.new)))  # yapf: disable
        home = Path(work, "home")
        prepare(old, home)
        for name in args.only:
            saves = [Path(work, "runs", side, name) for side in ("old", "new")]
            for tree, save in zip((old, new), saves):
                run(tree, home, SCENARIOS[name], save)
            found = compare(*saves)
            good = fits(found, SCENARIOS[name], args.first_step)
            bad += not good
            cells = " | ".join(f"{value:.1e}" if value else "equal" for value in found.values())
            print(f"| {name} | {cells} | {'' if good else 'DIFFERS'} |", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
