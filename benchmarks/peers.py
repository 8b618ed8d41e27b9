"""Compare a GRPO run with TRL's ``GRPOTrainer``, side by side: CPU seconds per step and tokens per CPU second.

    make peers [ARGS="--pairs 3 --threads 1 2 --cases equal ragged hard --out peers.json"]

Both trainers run in turn, each in a process of its own, on the same model, prompts, reward function, batch, lengths and
optimizer, one optimizer step per rollout. Three cases: ``equal`` is the quickstart (64 prompts x 8 samples, whose
answers have nearly one length); ``ragged`` has 3M random parameters and draws its end token with probability 1 / 97 (16
prompts x 8 samples, 91 of at most 256 tokens on average), and every sample has an advantage; ``hard`` is ``ragged``
with the reward of ``equal``, which that model does not earn: no sample has an advantage. ``lightrft`` trains every
sample, as TRL does; ``lightrft, default`` leaves out the samples without an advantage, which add exactly 0 to the
gradient. CPU seconds are user and system time of the process and its children, without the first steps.

TRL gets the fastest of the settings that were tried (``TRL``): float32 as here, no gradient checkpointing, 16 samples
in a pass and a static cache where responses differ in length, the whole batch in one pass where they do not. Its
continuous batching was slower; it has no packed rows for GRPO. This trainer has passes of at most 8192 tokens.
"""
import argparse
import io
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bare_loop import warm_model

Reward = Callable[..., list[float]]
Runner = Callable[[Any, str, str, str], "Meter"]  # case, model, data, folder of outputs -> what was measured
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "quickstart")]
WARM_UP = 1  # steps that are not counted
SAMPLES = 8


@dataclass(frozen=True)
class Case:
    """One comparison: its batch, its limit on responses, its optimizer and what TRL needs to be fast.

    ``model``: its folder within that of the comparison; ``sees``: prompts have pictures; ``sides``: what is compared;
    ``tools``: functions that the model may call, once; ``environ``: variables of the process.
    """
    prompts: int
    new_tokens: int
    rate: float
    steps: int
    reward: Reward
    trl: dict[str, Any]
    model: str = "sft/hf"
    sees: bool = False
    sides: tuple[str, ...] = ("trl", "lightrft", "lightrft, default")
    tools: tuple[Callable[..., Any], ...] = ()
    environ: dict[str, str] = field(default_factory=dict)


def exact(prompts: list, completions: list, answer: list[str], **columns: Any) -> list[float]:
    """The quickstart's reward, in the signature that both trainers take."""
    from reward import exact_answer
    return [exact_answer(_text(each), truth) for each, truth in zip(completions, answer)]


def digits(prompts: list, completions: list, **columns: Any) -> list[float]:
    """Share of digits: a number of which hardly two are equal, so that every sample has an advantage."""
    return [sum(map(str.isdigit, _text(each))) / (1 + len(_text(each))) for each in completions]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


RAGGED = Case(16, 256, 1e-6, 4, digits, {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 8,
                                         "cache_implementation": "static"}, "ragged")  # yapf: disable
CASES = {
    "equal": Case(64, 48, 3e-4, 10, exact, {"per_device_train_batch_size": 512}),
    "ragged": RAGGED,
    "hard": replace(RAGGED, reward=exact),
    "tiny": Case(2, 8, 1e-4, 1, exact, {"per_device_train_batch_size": 16}),  # for the test
}  # yapf: disable


def make_ragged(folder: Path, positions: int = 512) -> str:
    """Save a model of 3M random parameters and 97 tokens, among which it draws nearly evenly."""
    import torch
    from prepare import build_tokenizer
    from transformers import AddedToken, Qwen2Config, Qwen2ForCausalLM
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(f"<{i}>", normalized=False) for i in range(97 - len(tokenizer))])
    tokenizer.model_max_length = positions
    config = Qwen2Config(vocab_size=97, hidden_size=256, intermediate_size=683, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=positions,
                         tie_word_embeddings=True, initializer_range=0.002, bos_token_id=None,
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)  # yapf: disable
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def rows(data: str) -> list[dict[str, Any]]:
    """Read a quickstart's prompts, with their answers in a column; those with pictures are without placeholders, for
    both trainers put the pictures first then."""
    import pyarrow.parquet as pq
    found = [row | {"answer": row["reference"] if "reference" in row else row["reward_model"]["ground_truth"]}
             for row in pq.read_table(data).to_pylist()]  # yapf: disable
    if "images" not in found[0]:
        return [{name: row[name] for name in ("prompt", "answer")} for row in found]
    return [{"prompt": [turn | {"content": turn["content"].removeprefix("<image>")} for turn in row["messages"]],
             "images": row["images"], "answer": row["answer"]} for row in found]  # yapf: disable


def opened(batch: dict[str, list]) -> dict[str, list]:
    """Decode the pictures of some rows, as they are read."""
    from PIL import Image
    pictures = [[Image.open(io.BytesIO(one["bytes"])) for one in some] for some in batch["images"]]
    return batch | {"images": pictures}


class Meter:
    """CPU and wall seconds, tokens, samples and trained samples, from the end of the warm-up on.

    ``peak_mib`` is the most memory of the process above what it had at construction, when packages were imported.
    """

    def __init__(self) -> None:
        import psutil
        self.before = psutil.Process().memory_info().rss
        self.marks: list[list[float]] = []
        self.losses: list[float] = []
        self.tokens = self.samples = self.trained = 0

    def add(self, tokens: int, samples: int, trained: int, loss: float | None = None) -> None:
        """Count what a step has generated and trained."""
        self.losses += [] if loss is None else [loss]
        self.tokens, self.samples, self.trained = self.tokens + tokens, self.samples + samples, self.trained + trained

    def step(self) -> None:
        """Record the end of a step."""
        import psutil
        own = psutil.Process()
        times = [each.cpu_times() for each in (own, *own.children(recursive=True))]
        cpu = sum(each.user + each.system for each in times)
        self.marks.append([cpu, time.perf_counter(), self.tokens, self.samples, self.trained])

    def result(self) -> dict[str, Any]:
        """Return the means of a step, and the losses of all steps that are known."""
        first, last, steps = self.marks[WARM_UP - 1], self.marks[-1], len(self.marks) - WARM_UP
        means = [(after - before) / steps for before, after in zip(first, last)]
        found = dict(zip(("cpu_s", "wall_s", "tokens", "samples", "trained"), means))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return found | {"steps": steps, "tokens_per_cpu_s": found["tokens"] / found["cpu_s"],
                        "peak_mib": (peak - self.before) / 2**20, "losses": self.losses}  # yapf: disable


TRL: dict[str, Any] = dict(
    bf16=False, gradient_checkpointing=False, num_generations=SAMPLES, beta=0.0,
    epsilon=0.2, loss_type="dapo", temperature=1.0, lr_scheduler_type="constant", warmup_steps=0, adam_beta1=0.9,
    adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, save_strategy="no", report_to="none", logging_steps=1,
    disable_tqdm=True, use_cpu=True, remove_unused_columns=False)  # yapf: disable


def run_trl(case: Case, model: str, data: str, folder: str) -> Meter:
    """Run TRL's trainer, which trains every sample."""
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    meter = Meter()

    class Steps(transformers.TrainerCallback):

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            meter.step()

    def counted(completion_ids: list[list[int]], **inputs: Any) -> list[float]:
        meter.add(sum(map(len, completion_ids)), len(completion_ids), len(completion_ids))
        return case.reward(**inputs)

    options = TRL | case.trl | {"output_dir": folder, "max_steps": case.steps + WARM_UP, "learning_rate": case.rate,
                                "max_completion_length": case.new_tokens,
                                "max_tool_calling_iterations": 1}  # yapf: disable
    classes = ("AutoModelForImageTextToText", "AutoProcessor") if case.sees else ("AutoModelForCausalLM",
                                                                                  "AutoTokenizer")
    load, read = (getattr(transformers, name).from_pretrained for name in classes)
    prompts, reader = Dataset.from_list(rows(data)), read(model)
    if case.tools:
        from trl.chat_template_utils import qwen3_template
        reader.response_template = qwen3_template  # how its parser reads calls
    GRPOTrainer(load(model, dtype="float32", attn_implementation="sdpa"), counted, GRPOConfig(**options),
                prompts.with_transform(opened) if case.sees else prompts, processing_class=reader,
                callbacks=[Steps()], tools=[*case.tools] or None).train()  # yapf: disable
    return meter


OURS: dict[str, Any] = dict(
    n_samples_per_prompt=SAMPLES, lr_scheduler="constant", lr_warmup_ratio=0.0, prompt_max_len=64, max_norm=1.0,
    adam_betas=[0.9, 0.95], loss_agg_mode="token-mean", eps_clip=0.2, max_tokens_per_micro_batch=8192,
    disable_ckpt=True, strategy="single")  # yapf: disable


def run_lightrft(case: Case, model: str, data: str, folder: str, every: bool = False) -> Meter:
    """Run this trainer; with ``every`` sample, or without those that have no advantage."""
    from lightrft import GRPO
    from lightrft.trainer.ppo_trainer import PPOTrainer
    meter, end_step = Meter(), PPOTrainer._end_step

    def counted(self: PPOTrainer, metrics: dict[str, float]) -> None:
        end_step(self, metrics)
        samples = int(metrics["rollout/samples"])
        drawn = metrics["rollout/tokens"] / samples
        tokens = samples * metrics.get("rollout/whole_len/mean", drawn)  # TRL counts the results of tools too
        meter.add(round(tokens), samples, samples - int(metrics["rollout/dropped_samples"]))
        meter.step()

    PPOTrainer._end_step = counted  # type: ignore[method-assign]
    tools = {"tools": [*case.tools], "max_turns": 2} if case.tools else {}
    options = OURS | {"rollout_batch_size": case.prompts, "train_batch_size": case.prompts * SAMPLES,
                      "generate_max_len": case.new_tokens, "actor_learning_rate": case.rate,
                      "max_steps": case.steps + WARM_UP, "save_path": folder,
                      "drop_zero_advantage": not every} | tools  # yapf: disable
    GRPO(model, case.reward, rows(data), **options).train()
    return meter


SIDES: dict[str, Runner] = {"trl": run_trl, "lightrft": partial(run_lightrft, every=True),
                            "lightrft, default": run_lightrft}  # yapf: disable


def measure(runner: Runner, case: Any, model: str, data: str) -> None:
    """Run one trainer in this process; print its result as the last line."""
    from transformers import set_seed
    set_seed(0)
    os.environ |= case.environ
    with TemporaryDirectory() as folder:
        print(json.dumps(runner(case, model, data, folder).result()))


def start(side: str, name: str, model: Path, threads: int, home: Path, packages: Path) -> dict[str, Any]:
    """Run one trainer in a process of its own and return its result."""
    paths = [str(ROOT), *([str(packages)] if side.startswith("trl") else [])]
    environ = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false",
                            "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}  # yapf: disable
    command = [sys.executable, "-W", "ignore", sys.argv[0], "--child", side, name, str(model),
               str(home / "data" / "train.parquet")]  # yapf: disable
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(sides: Iterable[str], name: str, model: Path, threads: int, pairs: int, home: Path,
            packages: Path) -> dict[str, list[dict[str, Any]]]:
    """Run the trainers in turn, ``pairs`` times; return the results of each."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(pairs):
        for side, results in found.items():
            results.append(start(side, name, model, threads, home, packages))
    return found


def table(name: str, threads: int, found: dict[str, list[dict[str, Any]]]) -> str:
    """Render the rows of one case: medians, and the ratio of tokens per CPU second to TRL's (its least and most)."""
    rows_ = []
    for side, results in found.items():
        ratios = [mine["tokens_per_cpu_s"] / peer["tokens_per_cpu_s"] for mine, peer in zip(results, found["trl"])]
        keys = ("cpu_s", "wall_s", "tokens", "trained", "peak_mib", "tokens_per_cpu_s")
        cpu, wall, *counts = (statistics.median(each[key] for each in results) for key in keys)
        rows_.append(
            f"| {name} | {threads} | {side} | {cpu:.2f} | {wall:.2f} | {' | '.join(f'{one:.0f}' for one in counts)} | "
            f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} - {max(ratios):.2f}) |")
    return "\n".join(rows_)


def machine() -> dict[str, str]:
    """Describe what measures: date, CPU and versions."""
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ] if Path("/proc/cpuinfo").exists() else [platform.processor()]
    return {
        "date": time.strftime("%Y-%m-%d"), "cpu": f"{names[0]}, {len(names)} cores", "trl": "1.16.0", "python":
        platform.python_version()
    } | {each: version(each) for each in ("torch", "transformers")}


COLUMNS = ("case", "threads", "trainer", "CPU s / step", "wall s / step", "tokens / step", "trained / step",
           "peak MiB", "tokens / CPU s", "ratio")  # yapf: disable
HEADER = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|"


def main(description: str | None, cases: dict[str, Any], prepare: Callable[[Path, list[str]], None], chosen: list[str],
         sides: dict[str, Runner] = SIDES) -> None:
    """Print the table; write all results as JSON with ``--out``.

    Args:
        cases: by name; each has ``model``, its folder within that of the comparison, and ``sides``.
        prepare: makes the models and the prompts of some cases in a folder, if it has none yet.
        chosen: the cases that run if the command line names none.
        sides: the trainers by name; the ratios are to ``trl``.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each trainer, in turn")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", choices=cases, default=chosen)
    parser.add_argument("--out", type=Path, help="JSON file of all results")
    parser.add_argument("--packages", type=Path, default=Path(sys.prefix) / "oracles", help="folder with TRL")
    parser.add_argument("--home", type=Path, help="folder of the model and the data (default: a temporary one)")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        side, name, model, data = args.child
        return measure(sides[side], cases[name], model, data)
    if not (args.packages / "trl").is_dir():
        sys.exit(f"TRL is not in {args.packages}: run make peers")
    with TemporaryDirectory() as folder:
        home = args.home or Path(folder)
        prepare(home, args.cases)
        report(args, cases, home)


def prepare_models(home: Path, cases: list[str]) -> None:
    """Make the models and the prompts in ``home``, if it has none yet."""
    if not (home / "sft" / "hf").is_dir():
        warm_model(home)
    if {"ragged", "hard"} & {*cases} and not (home / "ragged").is_dir():
        make_ragged(home / "ragged")


def report(args: argparse.Namespace, cases: dict[str, Any], home: Path) -> None:
    """Measure all cases; print their rows and write their results as they come."""
    results = machine()
    print(", ".join(f"{key} {value}" for key, value in results.items()), HEADER, sep="\n\n", flush=True)
    runs: dict[str, Any] = {}
    for name in args.cases:
        for threads in args.threads:
            found = compare(cases[name].sides, name, home / cases[name].model, threads, args.pairs, home, args.packages)
            runs[f"{name}, threads {threads}"] = found
            print(table(name, threads, found), flush=True)
            if args.out:
                args.out.write_text(json.dumps(results | {"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main(__doc__, CASES, prepare_models, ["equal", "ragged", "hard"])
