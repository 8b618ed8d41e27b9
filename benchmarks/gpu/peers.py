"""TRL's GRPOTrainer against the trainer: the same model, prompts, reward and batch, on one GPU, in alternating runs."""
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.gpu.catalog import Setting, TRL
from benchmarks.gpu.store import ROOT, Row, Tables

ROUNDS, STEPS = 2, 4
Run = dict[str, float]  # seconds and generated tokens of the steps after the first


def trl(setting: Setting) -> Iterator[Tables]:
    """Run both in turn, each in a new process; the rows are medians, and the ratio of the pairs."""
    pairs: list[tuple[Run, Run]] = []
    for number in range(1 if setting.reduced else ROUNDS):
        pairs.append((in_process("ours", setting, number), in_process("theirs", setting, number)))
        rows = [row(name, [pair[i] for pair in pairs]) for i, name in enumerate(("lightrft", "TRL"))]
        ratio = statistics.median(cost(theirs) / cost(ours) for ours, theirs in pairs)
        yield {TRL: [rows[0] | {"time per token, TRL / lightrft": ratio}, rows[1]]}


def in_process(name: str, setting: Setting, number: int) -> Run:
    """Run one of the two on the first GPU; its output goes to the log of this measurement. TRL would take all GPUs."""
    scratch = Path(setting.scratch) / f"{name}-{number}"
    scratch.mkdir()
    out, words = scratch / "run.json", json.dumps(asdict(replace(setting, scratch=str(scratch))))
    child = ["benchmarks.gpu.child", "--function", f"peers:{name}", "--setting", words, "--out", str(out)]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    subprocess.run([sys.executable, "-m", *child], cwd=ROOT, check=True,
                   env=os.environ | {"CUDA_VISIBLE_DEVICES": first})  # yapf: disable
    return json.loads(out.read_text(encoding="utf-8"))


def cost(run: Run) -> float:
    """Return the seconds per generated token."""
    return run["s"] / run["tokens"]


def row(name: str, runs: list[Run]) -> Row:
    """Return medians over the rounds."""
    return {
        "trainer": name, "step, s": statistics.median(run["s"] for run in runs) / (STEPS - 1), "us / token":
        statistics.median(cost(run) for run in runs) * 1e6, "peak GiB": max(run["peak GiB"] for run in runs)
    }


def ours(setting: Setting) -> Iterator[Run]:
    """Run the trainer's steps."""
    from benchmarks.gpu.training import batch, run_steps
    lines = run_steps(setting, *batch(setting))[1:]
    yield {"s": sum(line["time/step_s"] for line in lines), "tokens": sum(line["rollout/tokens"] for line in lines),
           "peak GiB": lines[-1]["perf/peak_mem_gib"]}  # yapf: disable


def theirs(setting: Setting) -> Iterator[Run]:
    """Run TRL's steps: float32 weights and bfloat16 autocast, as the trainer has them; clipped token-mean loss."""
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.gpu.models import model_folder, write_prompts
    from benchmarks.gpu.reward import compute_score
    from benchmarks.gpu.training import batch
    from lightrft.utils.env import peak_memory_gib
    prompts, samples, new = batch(setting)
    count, micro = prompts * samples, min(32, prompts * samples)
    args = GRPOConfig(
        output_dir=setting.scratch, max_steps=STEPS, logging_steps=1, save_strategy="no", report_to="none",
        per_device_train_batch_size=micro, gradient_accumulation_steps=count // micro, num_generations=samples,
        max_completion_length=new, temperature=1.0, top_k=0, beta=0.0, learning_rate=1e-6, max_grad_norm=1.0,
        lr_scheduler_type="constant", loss_type="dapo", bf16=True, use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"}, disable_tqdm=True)  # yapf: disable

    def reward(completions: list[str], **columns: object) -> list[float]:
        return [compute_score("", text, "") for text in completions]

    data = load_dataset("json", data_files=str(write_prompts(setting)), split="train", cache_dir=setting.scratch)
    clock = StepClock()
    trainer = GRPOTrainer(str(model_folder(setting)), reward, args, data, callbacks=[clock])
    trainer.train()
    lengths = [
        line["completions/mean_length"] for line in trainer.state.log_history if "completions/mean_length" in line
    ]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield {"s": clock.ends[-1] - clock.ends[0], "tokens": sum(lengths[1:]) * count,
           "peak GiB": peak_memory_gib(device)}  # yapf: disable


class StepClock(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the time once the device is idle."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
