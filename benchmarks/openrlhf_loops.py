"""Run the loops of ``examples/openrlhf`` on several seeds: are the answers to held-out prompts better afterwards?

    python benchmarks/openrlhf_loops.py [--seeds 0 1 2] [--out runs/openrlhf_loops] [--docs]

An answer is six letters of ``abcd``, and the rule counts its ``a``. The policy is trained by ``train_sft`` on random
answers, the reward model by ``train_rm`` on pairs of them; the scripts see this reward model alone. Then every model
answers the held-out prompts. A gain is the mean over these prompts of the difference of two models, and its standard
error is that of this mean. Conditional SFT trains one model, which is asked for a high and for a low reward. A finished
seed is not repeated. Prints a table; ``--docs`` puts it and its data into the docs. A missed aim is an error.
"""
import argparse
import json
import os
import random
import shlex
import subprocess
import sys
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "examples" / "quickstart")]

from matrix_report import Outputs, Results, replace_section, write  # noqa: E402

START, END = "<!-- loops -->", "<!-- /loops -->"
OUTPUTS = Outputs(ROOT / "docs" / "data" / "openrlhf_loops.json", ROOT / "docs" / "generate.md", Path())
PROMPTS, HELD_OUT, CHATS, PAIRS = 128, 64, 16, 1000  # chats: of each prompt
ORDERINGS, DRAWN = 200, 4  # held-out pairs; answers to a held-out prompt
ORDERED, ERRORS = 0.9, 3.0  # aims: share of held-out pairs, and gains in standard errors
WISH = 1.5  # standard deviations of the rewards of the data
JUDGES = {"reward model": "rm", "rule": "letters"}  # name -> its part of a reward
RULE = '''
def letters(data_source, solution_str, ground_truth=None, extra_info=None):
    """Count the right letters of an answer."""
    return solution_str.count("a")
'''
SIZES = {"EVAL_TASK": "generate", "MAX_LEN": 64, "MAX_NEW_TOKENS": 8, "ROLLOUT_BATCH_SIZE": PROMPTS // 2,
         "TRAIN_BATCH_SIZE": 8, "TP_SIZE": 1, "TRAINING_ITERS": 2, "N": 8, "TRAIN_ARGS": ""}  # yapf: disable
LOOPS: dict[str, dict[str, Any]] = {
    "rejection_sampling": {"LR": 5e-3, "EPOCHS": 2},
    "iterative_dpo": {"LR": 3e-4, "EPOCHS": 2, "MIN_REWARD_GAP": 0.5},
    "conditional_sft": {"LR": 5e-3, "EPOCHS": 4, "TRAIN_BATCH_SIZE": 32, "WISH": WISH,
                        "TRAIN_ARGS": "--bf16 false --gradient_checkpointing false"},  # which are slow on a CPU
}  # yapf: disable
GAINS = {  # name in the table -> answers after, answers before, and the judges that have an aim
    "RAFT": ("rejection_sampling", "policy", ("reward model", "rule")),
    "iterative DPO": ("iterative_dpo", "policy", ("reward model", "rule")),
    "conditional SFT, high wish - policy": ("high", "policy", ("rule", )),
    "conditional SFT, high wish - low wish": ("high", "low", ("rule", )),
}  # yapf: disable


def chat(number: int, answer: str = "") -> list[dict[str, str]]:
    """Return the turns of a prompt, and of an answer to it if there is one."""
    return [{"role": "user", "content": f"{number}?"}, *[{"role": "assistant", "content": answer}] * bool(answer)]


def answer(rng: random.Random) -> str:
    """Draw an answer."""
    return "".join(rng.choices("abcd", k=6))


def pair(rng: random.Random, number: int) -> dict[str, Any]:
    """Draw two answers to a prompt, of which one has more right letters."""
    while True:
        low, high = sorted((answer(rng), answer(rng)), key=lambda text: text.count("a"))
        if low.count("a") < high.count("a"):
            return {"prompt": chat(number), **{name: chat(number, text)[1:] for name, text in
                                               (("chosen", high), ("rejected", low))}}  # yapf: disable


def write_rows(folder: Path, seed: int, chats: int, pairs: int) -> None:
    """Write prompts, chats and pairs, of which the held-out ones have other prompts, and the file of the rule."""
    rng = random.Random(seed)
    numbers = rng.sample(range(1000), PROMPTS + HELD_OUT)
    seen, held_out = numbers[:PROMPTS], numbers[PROMPTS:]
    rows: dict[str, list[Any]] = {
        "prompts": [{"context_messages": chat(number)} for number in seen],
        "held_out": [{"context_messages": chat(number)} for number in held_out],
        "chats": [{"chosen": chat(number, answer(rng))} for _ in range(chats) for number in seen],
        "pairs": [pair(rng, rng.choice(seen)) for _ in range(pairs)],
        "held_out_pairs": [pair(rng, rng.choice(held_out)) for _ in range(ORDERINGS)],
    }  # yapf: disable
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    (folder / "rule.py").write_text(RULE, encoding="utf-8")


def write_base(folder: Path, seed: int) -> None:
    """Save the untrained model of the quickstart, whose tokenizer also has the characters of ``<rm_score>``."""
    import torch
    from common import build_tokenizer, text_config
    from transformers import Qwen2Config, Qwen2ForCausalLM
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(list("<>_"))
    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config(**text_config(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def command(words: str, folder: Path, environ: Mapping[str, str]) -> None:
    """Run a command of ``lightrft`` in ``folder``."""
    run([environ["PYTHON"], "-m", *shlex.split(words)], folder, environ)


def run(words: list[str], folder: Path, environ: Mapping[str, str]) -> None:
    """Run a program; its failure ends this one, with the end of what it printed."""
    done = subprocess.run(words, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-4000:]}")


def prepare_seed(folder: Path, seed: int, environ: Mapping[str, str], chats: int = CHATS, pairs: int = PAIRS) -> None:
    """Fill ``folder`` with the rows, the policy and the reward model of a seed."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder, seed, chats, pairs)
    write_base(folder / "base", seed)
    common = (f"--pretrain base --seed {seed} --max_len 64 --train_batch_size 32 --apply_chat_template --disable_ckpt "
              "--report false --logging_steps 100")
    command(f"lightrft.cli.train_sft {common} --train_data chats.jsonl --input_key chosen --save_path policy "
            "--learning_rate 3e-3", folder, environ)  # yapf: disable
    command(f"lightrft.cli.train_rm {common} --train_data pairs.jsonl --eval_data held_out_pairs.jsonl --max_epochs 2 "
            "--save_path rm --learning_rate 1e-3", folder, environ)  # yapf: disable


def loop(script: str, folder: Path, seed: int, environ: Mapping[str, str], **variables: Any) -> Path:
    """Run a script of ``examples/openrlhf`` on the models of a seed; return its folder."""
    out, sizes = folder / script, SIZES | LOOPS[script]
    paths = {"POLICY": "policy", "REWARD_MODEL": "rm", "PROMPTS": "prompts.jsonl", "DATASET": "chats.jsonl"}
    train = f"{sizes['TRAIN_ARGS']} --seed {seed} --micro_train_batch_size {sizes['TRAIN_BATCH_SIZE']}"
    values = sizes | {name: folder / path for name, path in paths.items()} | variables | {
        "OUT": out, "GENERATE_ARGS": f"--seed {seed}", "TRAIN_ARGS": train}  # yapf: disable
    run(["bash", str(ROOT / "examples" / "openrlhf" / f"{script}.sh")], folder,
        {**environ, **{name: str(value) for name, value in values.items()}})
    return out


def answers(name: str, model: str, folder: Path, seed: int, environ: Mapping[str, str], flags: str = "") -> None:
    """Let a model answer the held-out prompts; the reward model and the rule judge the answers."""
    command(
        f"lightrft.cli.generate --pretrain {model} --prompt_data held_out.jsonl --input_key context_messages "
        f"--apply_chat_template --prompt_max_len 64 --generate_max_len 8 --best_of_n {DRAWN} "
        f"--score rm=./rm rule.py:letters --seed {seed} {flags} --output_path {name}.jsonl", folder, environ)


def judged(file: Path) -> dict[str, list[float]]:
    """Return the mean of the answers to each prompt by each judge, in the order of the prompts."""
    groups: dict[str, list[Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        groups.setdefault(row["prompt_id"], []).append(row["reward_parts"])
    return {judge: [fmean(parts[part] for parts in groups[prompt]) for prompt in sorted(groups)]
            for judge, part in JUDGES.items()}  # yapf: disable


def gain(name: str, folder: Path, seed: int) -> dict[str, Any]:
    """Compare two files of answers by each judge: both means, and the standard error of their difference."""
    after, before, _ = GAINS[name]
    better, worse = judged(folder / f"{after}.jsonl"), judged(folder / f"{before}.jsonl")
    row: dict[str, Any] = {"run": name, "seed": seed}
    for judge in JUDGES:
        differences = [a - b for a, b in zip(better[judge], worse[judge], strict=True)]
        row[judge] = {"before": fmean(worse[judge]), "after": fmean(better[judge]),
                      "error": stdev(differences) / sqrt(len(differences))}  # yapf: disable
    return row


def errors(result: dict[str, float]) -> float:
    """Return a gain in its standard errors."""
    return (result["after"] - result["before"]) / result["error"]


def ordered(folder: Path) -> float:
    """Return the share of held-out pairs that the reward model orders rightly."""
    last = (folder / "rm" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    return float(json.loads(last)["eval/accuracy"])


def improved(script: str, folder: Path, seed: int, environ: Mapping[str, str], **variables: Any) -> None:
    """Run RAFT or iterative DPO, and let the last model answer."""
    out = loop(script, folder, seed, environ, **variables)
    answers(script, f"{out}/checkpoint", folder, seed, environ)


def conditioned(folder: Path, seed: int, environ: Mapping[str, str], **variables: Any) -> None:
    """Run conditional SFT, and let its model answer twice: asked for a high and for a low reward."""
    out = loop("conditional_sft", folder, seed, environ, **variables)
    for name, wish in (("high", WISH), ("low", -WISH)):
        answers(name, f"{out}/checkpoint", folder, seed, environ,
                f"--enable_csft --csft_prompt '<rm_score>: {wish:.2f}'")  # yapf: disable


def measure(folder: Path, seed: int, environ: Mapping[str, str]) -> Results:
    """Run the three loops of a seed; return how well its reward model orders held-out pairs, and the gains."""
    prepare_seed(folder, seed, environ)
    answers("policy", "policy", folder, seed, environ)
    for script in ("rejection_sampling", "iterative_dpo"):
        improved(script, folder, seed, environ)
    conditioned(folder, seed, environ)
    judge = {"run": "reward model", "seed": seed, "accuracy": ordered(folder)}
    return [judge, *(gain(name, folder, seed) for name in GAINS)]


def finished(folder: Path, seed: int, environ: Mapping[str, str]) -> Results:
    """Measure a seed, or read what an earlier call has measured."""
    file = folder / "results.json"
    if not file.exists():
        file.write_text(json.dumps(measure(folder, seed, environ)), encoding="utf-8")
    results: Results = json.loads(file.read_text(encoding="utf-8"))
    return results


def of_run(results: Results, name: str) -> Results:
    """Return the results of a run in the order of the seeds."""
    return sorted((row for row in results if row["run"] == name), key=lambda row: row["seed"])


def missed(results: Results) -> list[str]:
    """Return the aims that a seed has missed."""
    share = min(row["accuracy"] for row in of_run(results, "reward model"))
    failed = [f"reward model: {share:.3f} of held-out pairs, aim {ORDERED}"] * (share < ORDERED)
    for name, (_, _, judges) in GAINS.items():
        for judge in judges:
            least = min(errors(row[judge]) for row in of_run(results, name))
            text = f"{name}, {judge}: {least:.1f} standard errors, aim {ERRORS:.0f}"
            failed += [text] * (least < ERRORS)
    return failed


def row(name: str, judge: str, results: Results) -> str:
    """Render the gain of a run by one judge, with a number for each seed."""
    found = [result[judge] for result in of_run(results, name)]
    before, after = (", ".join(f"{one[key]:.2f}" for one in found) for key in ("before", "after"))
    aim = f"{ERRORS:.0f}" if judge in GAINS[name][2] else ""
    return f"| {name} | {judge} | {before} | {after} | {', '.join(f'{errors(one):.1f}' for one in found)} | {aim} |"


def table(results: Results) -> str:
    """Render Markdown: a row per gain and judge."""
    seeds = ", ".join(map(str, sorted({result["seed"] for result in results})))
    shares = ", ".join(f"{result['accuracy']:.3f}" for result in of_run(results, "reward model"))
    lines = ["| gain | judge | before | after | gain in standard errors | aim |", "|---|---|---|---|---|---|",
             *(row(name, judge, results) for name in GAINS for judge in JUDGES)]  # yapf: disable
    return "\n".join(lines) + f"""

Seeds {seeds}. The reward model orders {shares} of {ORDERINGS} held-out pairs (aim: {ORDERED}).
"""


def section(results: Results) -> str:
    """Render the text between the marks of the page."""
    return f"\n{table(results)}"


def publish(results: Results) -> None:
    """Write data and table into the docs."""
    write(results, OUTPUTS.data)
    replace_section(OUTPUTS.page, START, END, section(results))


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of data, models and sampling")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "openrlhf_loops", help="folder of the runs")
    parser.add_argument("--docs", action="store_true", help="put the results into the docs as well")
    args = parser.parse_args()
    environ = os.environ | {"PYTHON": sys.executable, "LAUNCH": f"{sys.executable} -m", "OMP_NUM_THREADS": "1",
                            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}  # yapf: disable
    folders = {seed: args.out.resolve() / f"seed_{seed}" for seed in args.seeds}
    results = [result for seed, folder in folders.items() for result in finished(folder, seed, environ)]
    if args.docs:
        publish(results)
    print(table(results))
    if failed := missed(results):
        sys.exit("\n".join(["an aim was missed:", *failed]))


if __name__ == "__main__":
    main()
