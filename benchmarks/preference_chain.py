"""Train a chain of everything that learns from answers of one tiny model, on several seeds: held-out accuracy of each.

    python benchmarks/preference_chain.py [--seeds 0 1 2] [--out runs/chain] [--student_epochs 6] [--docs]

A careless teacher answers additions. Its right and wrong answers are the pairs of DPO, IPO, SimPO and ORPO and the rows
of KTO. Reward models learn from pairs, process reward models from columns; they also see answers at a high temperature,
because the teacher makes one kind of error and RL finds others. They are then the only reward of GRPO and PPO, with a
KL to the teacher; the critic starts from the reward model. RAFT and iterative DPO answer anew in each of two rounds,
and the model of RAFT is distilled into an untrained student. At the end all are evaluated on the same problems,
greedily. A stage that is done is not repeated, so an interrupted call resumes. Prints a table; ``--docs`` puts it, its
data and the picture into the docs. An aim that a seed misses is an error.
"""
import argparse
import json
import multiprocessing
import os
import re
import resource
import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples")]
os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # before torch is imported

import rounds  # noqa: E402
from matrix_report import band, Outputs, Results, replace_section, write  # noqa: E402

from lightrft.cli.main import COMMANDS  # noqa: E402

START, END = "<!-- chain -->", "<!-- /chain -->"
OUTPUTS = Outputs(ROOT / "docs" / "data" / "preference_chain.json", ROOT / "docs" / "preferences.md",
                  ROOT / "docs" / "images" / "preference_chain.png")
LOSSES = {
    "sigmoid": "--beta 1 --learning_rate 1e-4",
    "ipo_mean": "--beta 0.5 --learning_rate 1e-3 --nll_loss_coef 1",
    "simpo": "--beta 2 --learning_rate 1e-3 --nll_loss_coef 1",
    "orpo": "--beta 0.5 --learning_rate 1e-3",
}
NAMES = {
    "sft": "teacher", "sigmoid": "DPO", "ipo_mean": "IPO (`ipo_mean`)", "simpo": "SimPO", "orpo": "ORPO", "kto": "KTO",
    "grpo_rm": "GRPO on the reward model", "ppo_rm": "PPO on the reward model",
    "grpo_prm": "GRPO on the process reward model", "raft": "RAFT, two rounds",
    "iterative_dpo": "iterative DPO, two rounds", "student": "student of RAFT's model"
}  # yapf: disable
GAINS = {**dict.fromkeys(("sigmoid", "ipo_mean", "simpo", "orpo", "kto"), 0.15),
         **dict.fromkeys(("grpo_rm", "ppo_rm", "grpo_prm", "raft", "iterative_dpo"), 0.3)}  # yapf: disable
ORDERED, JUDGED, SHARE = 0.95, 0.85, 0.9  # aims of the reward model, the process reward model and the student
SAMPLED = "--prompt_max_len 64 --generate_max_len 48 --best_of_n 8 --score exact"
TRAINED = "--max_len 128 --train_batch_size 32 --disable_ckpt --logging_steps 100 --report false"
RL = ("--reward_recipe quickstart_rule:rm=1 --strategy auto --eval_steps 0 --no_eval_at_start --disable_ckpt "
      "--report false --prompt_max_len 64 --generate_max_len 48 --no_save_trajectories --no_use_tensorboard "
      "--no_self_test --max_steps 15 --print_samples 0 --init_kl_coef 0.04 --use_kl_loss")
PPO = ("--advantage_estimator gae --advantages_norm --critic_pretrain {critic} --critic_learning_rate 1e-3 "
       "--value_clip 0")
HELD_OUT = 100  # answers that reward models are measured on
EPOCHS = 6  # of the student in the docs


class Stage(NamedTuple):
    """A command of the chain: its name, a command of ``lightrft`` or a script, and its words."""
    name: str
    target: str
    words: str


def stages(out: Path, seed: int, student_epochs: int = EPOCHS) -> Iterator[Stage]:
    """Yield the commands of one seed in their order."""
    teacher, data = f"{out}/sft/hf", f"--prompt_data {out}/data/train.parquet --seed {seed}"
    start = f"--pretrain {teacher} --seed {seed} {TRAINED}"
    rows = "--train_rows 4000 --test_rows 500"
    yield Stage("prepare", "examples/quickstart/prepare.py", f"--out {out} --seed {seed} {rows}")
    yield Stage("sft", "sft", f"--pretrain {out}/base --train_data {out}/data/sft.parquet --save_path {out}/sft "
                f"--seed {seed} --learning_rate 3e-3 {TRAINED}")  # yapf: disable
    yield Stage("answers", "generate", f"--pretrain {teacher} {data} --max_samples 1000 {SAMPLED} "
                f"--output_path {out}/answers.jsonl")  # yapf: disable
    yield Stage("varied", "generate", f"--pretrain {teacher} {data} --max_samples 2000 {SAMPLED} --temperature 1.5 "
                f"--output_path {out}/varied.jsonl")  # yapf: disable
    yield Stage("pairs", "generate", f"--eval_task rm --prompt_data {out}/answers.jsonl --input_key input "
                f"--post_processor iter_dpo --output_path {out}/pairs.jsonl")  # yapf: disable
    yield from policies(out, start)
    yield from rewarded(out, start, data)
    yield from loops(out, seed, teacher)
    yield from distilled(out, seed, data, student_epochs)
    models = " ".join(f"{out}/{name}/hf" for name in NAMES)
    yield Stage("evaluate", "evaluate", f"--pretrain {models} --eval_data {out}/data/test.parquet --score exact "
                f"--prompt_max_len 64 --generate_max_len 48 --output_path {out}/evaluation")  # yapf: disable


def policies(out: Path, start: str) -> Iterator[Stage]:
    """Yield the policies that learn from pairs, and KTO."""
    for loss, flags in LOSSES.items():
        yield Stage(loss, "dpo", f"{start} --train_data {out}/pairs_train.jsonl --loss {loss} --max_epochs 3 {flags} "
                    f"--save_path {out}/{loss}")  # yapf: disable
    yield Stage("kto", "kto", f"{start} --train_data {out}/judged.jsonl --beta 0.5 --learning_rate 3e-4 "
                f"--save_path {out}/kto")  # yapf: disable


def rewarded(out: Path, start: str, data: str) -> Iterator[Stage]:
    """Yield the reward models, and the policies of which they are the only reward."""
    steps = "--placeholder_token % --reward_tokens + - --step_separator ,"
    for name, rows, flags in (("rm", "pairs", ""), ("prm", "steps", steps)):
        yield Stage(name, name, f"{start} --train_data {out}/{rows}_varied.jsonl --eval_data {out}/{rows}_test.jsonl "
                    f"--max_epochs 2 --learning_rate 1e-3 --save_path {out}/{name} {flags}")  # yapf: disable
    for name, model, flags in (("grpo_rm", "rm", ""), ("ppo_rm", "rm", PPO.format(critic=f"{out}/rm/hf")),
                               ("grpo_prm", "prm", "--step_reward min")):
        yield Stage(name, "examples/quickstart/train_colocate.py", f"--pretrain {out}/sft/hf {data} {RL} "
                    f"--reward_pretrain {out}/{model}/hf --save_path {out}/{name} {flags}")  # yapf: disable


def loops(out: Path, seed: int, teacher: str) -> Iterator[Stage]:
    """Yield the commands of the loops without their evaluations, as the scripts of the examples run them."""
    for name, rows, train in (("raft", "rs", "sft --learning_rate 1e-3"), ("iterative_dpo", "iter_dpo",
                                                                           f"dpo {LOSSES['sigmoid']} --max_epochs 2")):
        words = ["--model", teacher, "--out", f"{out}/{name}", "--rounds", "2", "--prompts", "1000", "--evaluate", "-",
                 "--generate", f"--prompt_data {out}/data/train.parquet {SAMPLED} --post_processor {rows} "
                 f"--seed {seed}",
                 "--train", f"{train} --seed {seed} {TRAINED}"]  # yapf: disable
        for step in rounds.steps(rounds.options().parse_args(words)):
            if step.words[0] != "evaluate":
                target, *rest = step.words
                yield Stage(f"{step.folder.relative_to(out)}/{target}".replace("/", "-"), target, " ".join(rest))


def distilled(out: Path, seed: int, data: str, epochs: int) -> Iterator[Stage]:
    """Yield the distillation of RAFT's model into an untrained student, on answers of the teacher to new problems."""
    teacher = f"{out}/raft/hf"
    yield Stage("demonstrations", "generate", f"--pretrain {teacher} {data} --output_path {out}/demonstrations.jsonl "
                "--prompt_max_len 64 --generate_max_len 48 --temperature 0.7 --best_of_n 4")  # yapf: disable
    yield Stage("student", "kd", f"--pretrain {out}/base --teacher_model {teacher} --seed {seed} {TRAINED} "
                f"--train_data {out}/demonstrations.jsonl --kd_coef 0.9 --learning_rate 3e-3 --max_epochs {epochs} "
                f"--save_path {out}/student")  # yapf: disable


def columns_of(response: str, question: str) -> tuple[list[str], list[bool]]:
    """Return the columns of a response and which of them are right: digits, carry and sum; the last with the answer."""
    numbers = re.findall(r"\d+", question)
    pairs = [(int(a), int(b)) for a, b in zip(*(number[::-1] for number in numbers))]
    steps, labels, carry = response.split(","), list[bool](), 0
    for (a, b), step in zip(pairs, steps):
        labels.append(f"{a}+{b}+{carry}={a + b + carry:02d}" == step.removeprefix("<think>").partition("</think>")[0])
        carry = (a + b + carry) // 10
    labels += [False] * (len(steps) - len(labels))
    labels[-1] &= step_answer(steps[-1]) == sum(map(int, numbers))
    return steps, labels


def step_answer(step: str) -> int | None:
    """Return the boxed number of the last column."""
    found = re.search(r"\\boxed\{(\d+)\}$", step)
    return int(found[1]) if found else None


def make_rows(out: Path) -> None:
    """Write the training rows of KTO and of the reward models, from the answers of the teacher."""
    answers, varied, pairs = (rounds.read(out / f"{name}.jsonl") for name in ("answers", "varied", "pairs"))
    once = distinct(answers)
    judged = [{"prompt": row["input"], "completion": row["output"], "label": row["reward"] == 1} for row in once]
    tests = {"pairs": pairs[-HELD_OUT:], "steps": steps_of(once)[-HELD_OUT:]}
    hidden = {row["prompt"] for rows in tests.values() for row in rows}
    seen = [row for row in distinct([*answers, *varied]) if row["input"] not in hidden]
    save(out / "judged.jsonl", judged)
    save(out / "pairs_train.jsonl", pairs[:-HELD_OUT])
    for name, rows in (("pairs", comparisons(seen)), ("steps", steps_of(seen))):
        save(out / f"{name}_varied.jsonl", rows)
        save(out / f"{name}_test.jsonl", tests[name])


def distinct(answers: list[Any]) -> list[Any]:
    """Return the answers without repetitions."""
    return list({(row["input"], row["output"]): row for row in answers}.values())


def steps_of(answers: list[Any]) -> list[Any]:
    """Return the rows of a process reward model, of the answers that have columns."""
    return [dict(zip(("completions", "labels"), columns_of(row["output"], row["input"])), prompt=row["input"])
            for row in answers if "%" not in row["output"] and all(row["output"].split(","))]  # yapf: disable


def comparisons(answers: list[Any]) -> list[Any]:
    """Return a pair for each wrong answer to a problem that has a right one, in turn with each of these."""
    right: dict[str, list[str]] = {}
    for row in answers:
        if row["reward"] == 1:
            right.setdefault(row["input"], []).append(row["output"])
    wrong = [(row["input"], row["output"]) for row in answers if row["reward"] != 1 and row["output"]]
    return [{"prompt": prompt, "chosen": right[prompt][i % len(right[prompt])], "rejected": output}
            for i, (prompt, output) in enumerate(wrong) if prompt in right]  # yapf: disable


def save(path: Path, rows: list[Any]) -> None:
    """Write a jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def child(stage: Stage, log: Path) -> None:
    """Become the process of a stage; its CPU-seconds are the last line of the log."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    words = stage.words.split()
    try:
        if stage.target.endswith(".py"):
            sys.argv[:] = [stage.target, *words]
            sys.path.insert(0, str(ROOT / stage.target.rpartition("/")[0]))
            runpy.run_path(str(ROOT / stage.target), run_name="__main__")
        else:
            import_module(COMMANDS[stage.target][0]).main(words)
    finally:
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(f"\n{used.ru_utime + used.ru_stime:.1f}", flush=True)


def run(stage: Stage, out: Path) -> float:
    """Run a stage that is not done, and return its CPU-seconds; a failure ends the program with the end of its log."""
    done, log = out / "done" / stage.name, out / "logs" / f"{stage.name}.txt"
    if not done.exists():
        process = multiprocessing.get_context("fork").Process(target=child, args=(stage, log))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{stage.name} failed:\n{log.read_text(encoding='utf-8')[-4000:]}")
        done.write_text(log.read_text(encoding="utf-8").split()[-1], encoding="utf-8")
        print(f"{out.name} {stage.name}: {done.read_text(encoding='utf-8')} CPU s", flush=True)
    return float(done.read_text(encoding="utf-8"))


def chain(out: Path, seed: int, student_epochs: int = EPOCHS) -> Results:
    """Run the chain of one seed; return a result per model."""
    for name in ("done", "logs"):
        (out / name).mkdir(parents=True, exist_ok=True)
    seconds = 0.0
    for stage in stages(out, seed, student_epochs):
        seconds += run(stage, out)
        if stage.name == "pairs":
            make_rows(out)
        if stage.name.startswith(("raft-round_2-trained", "iterative_dpo-round_2-trained")):
            link = out / stage.name.split("-")[0] / "hf"
            if not link.is_symlink():
                link.symlink_to("round_2/trained/hf")
    return results(out, seed, seconds)


def results(out: Path, seed: int, seconds: float) -> Results:
    """Collect the accuracy of every model of a seed, and how well the reward models judge."""
    found = {row["model"]: row["value"] for row in rounds.read(out / "evaluation" / "results.jsonl")
             if row["metric"] == "pass@1"}  # yapf: disable
    rows = [{"run": name, "seed": seed, "accuracy": round(found[f"{name}-hf"], 4)} for name in NAMES]
    judged = [{"run": name, "seed": seed, "accuracy": round(rounds.read(out / name / "metrics.jsonl")[-1][
        "eval/accuracy"], 4)} for name in ("rm", "prm")]  # yapf: disable
    return [*rows, *judged, {"run": "chain", "seed": seed, "cpu_seconds": round(seconds)}]


def of_run(found: Results, name: str, key: str = "accuracy") -> list[float]:
    """Return a number of a run, in the order of the seeds."""
    return [row[key] for row in sorted(found, key=lambda row: row["seed"]) if row["run"] == name]


def missed(found: Results) -> list[str]:
    """Return the aims that a seed has missed."""
    before = of_run(found, "sft")
    gains = {name: min(b - a for a, b in zip(before, of_run(found, name))) for name in GAINS}
    failed = [f"{NAMES[name]}: {gain:+.3f}, aim {GAINS[name]:+.2f}" for name, gain in gains.items()
              if gain < GAINS[name]]  # yapf: disable
    if (ordered := min(of_run(found, "rm"))) < ORDERED:
        failed.append(f"reward model: {ordered:.3f} of held-out pairs, aim {ORDERED}")
    if (judged := min(of_run(found, "prm"))) < JUDGED:
        failed.append(f"process reward model: {judged:.3f} of the steps, aim {JUDGED}")
    if (share := share_of_teacher(found)) < SHARE:
        failed.append(f"student: {share:.3f} of the accuracy of its teacher, aim {SHARE}")
    return failed


def share_of_teacher(found: Results) -> float:
    """Return the accuracy of the student over that of its teacher, of the worst seed."""
    return min(b / a for a, b in zip(of_run(found, "raft"), of_run(found, "student")))


def table(found: Results) -> str:
    """Render Markdown: a row per model, over its seeds."""
    seeds, before = sorted({row["seed"] for row in found}), of_run(found, "sft")
    lines = ["| model | held-out accuracy | gain, worst seed | aim |", "|---|---|---|---|"]
    for name, shown in NAMES.items():
        after, aim = of_run(found, name), f"{GAINS[name]:+.2f}" if name in GAINS else ""
        gain = "" if name == "sft" else f"{min(b - a for a, b in zip(before, after)):+.3f}"
        lines.append(f"| {shown} | {band(after)} | {gain} | {aim} |")
    return "\n".join(lines) + f"""

Seeds {', '.join(map(str, seeds))}: mean, lowest and highest. The student has at least {share_of_teacher(found):.3f} of
the accuracy of its teacher (aim: {SHARE}). The reward model orders {band(of_run(found, 'rm'))} of {HELD_OUT} held-out
pairs (aim: {ORDERED}); the process reward model judges {band(of_run(found, 'prm'))} of the steps of {HELD_OUT} answers
(aim: {JUDGED}). One seed takes {mean(of_run(found, 'chain', 'cpu_seconds')):.0f} CPU-seconds.
"""


def draw(found: Results, png: Path) -> None:
    """Draw the accuracy of every model: a bar for the mean, a point per seed, a line at the teacher."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    figure = Figure(figsize=(7, 3.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, name in enumerate(reversed(NAMES)):
        values = of_run(found, name)
        axes.barh(place, mean(values), color="#1f77b4", alpha=0.5)
        axes.plot(values, [place] * len(values), "k.", markersize=4)
    axes.axvline(mean(of_run(found, "sft")), color="0.5", linewidth=1)
    axes.set_yticks(range(len(NAMES)), [shown.replace("`", "") for shown in reversed(NAMES.values())], fontsize=8)
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("held-out accuracy")
    figure.savefig(png, format="png")


def section(found: Results) -> str:
    """Render the text between the marks of the page."""
    return f"\n{table(found)}\n![held-out accuracy of every model](images/preference_chain.png)\n"


def publish(found: Results) -> None:
    """Write data, table and picture into the docs."""
    write(found, OUTPUTS.data)
    replace_section(OUTPUTS.page, START, END, section(found))
    draw(found, OUTPUTS.picture)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of data, models and sampling")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "chain", help="folder of the runs")
    parser.add_argument("--student_epochs", type=int, default=EPOCHS, help="passes of the student over its answers")
    parser.add_argument("--docs", action="store_true", help="put the results into the docs as well")
    args = parser.parse_args()
    for module in ("torch.distributed.checkpoint", "transformers.models.qwen2.modeling_qwen2",
                   "lightrft.inference.batch", "lightrft.inference.evaluation", "lightrft.trainer.offline.dpo_trainer",
                   "lightrft.trainer.spmd_ppo_trainer", "lightrft.strategy.strategy"):  # once, not in every stage
        import_module(module)
    found = [row for seed in args.seeds
             for row in chain(args.out.resolve() / f"seed_{seed}", seed, args.student_epochs)]  # yapf: disable
    if args.docs:
        publish(found)
    print(table(found))
    if failed := missed(found):
        sys.exit("\n".join(["an aim was missed:", *failed]))


if __name__ == "__main__":
    main()
