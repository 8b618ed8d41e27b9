"""Compare the trainer with the same GRPO step in a minimal plain-PyTorch loop, paired in one run.

    python benchmarks/bare_loop.py [--steps 20] [--pairs 3]

The bare loop has no framework at all: a padded batch, a static key-value cache, one backward pass, Adam. The trainer
does the same step (same model, 16 prompts x 8 samples, one optimizer step) with everything a run needs around it. Both
run on one process with the same threads (OMP_NUM_THREADS, default: all cores); seconds are compared per generated
token, because sampled lengths differ a little. The last row is the trainer on two FSDP2 ranks.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
PROMPTS, GROUP, MAX_NEW = 16, 8, 48
FLAGS = (f"--rollout_batch_size {PROMPTS} --n_samples_per_prompt {GROUP} --train_batch_size {PROMPTS * GROUP} "
         f"--generate_max_len {MAX_NEW} --prompt_max_len 64 --actor_learning_rate 3e-4 --lr_scheduler constant "
         "--reward exact --disable_ckpt").split()  # of the trainer
THREADS = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 2))  # of all ranks together


def bare_run(model_folder: str, data: str, steps: int) -> tuple[float, int]:
    """Measure seconds and generated tokens of ``steps`` bare GRPO steps (after two that warm up)."""
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    rows = pq.read_table(data).to_pylist()
    seconds, tokens = 0.0, 0
    for step in range(steps + 2):
        start = time.perf_counter()
        generated = bare_step(model, tokenizer, optimizer, rows[step * PROMPTS:(step + 1) * PROMPTS])
        if step >= 2:
            seconds, tokens = seconds + time.perf_counter() - start, tokens + generated
    return seconds, tokens


def bare_step(model, tokenizer, optimizer, rows) -> int:
    """Run one GRPO step; return the number of generated tokens. (All prompts of the task have the same length.)"""
    import torch
    from reward import exact_answer
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    prompt = torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"]).repeat_interleave(GROUP, 0)
    response = bare_generate(model, prompt, tokenizer.eos_token_id)
    ended = (response == tokenizer.eos_token_id).cumsum(1)
    mask = (ended - (response == tokenizer.eos_token_id).long()) == 0
    answers = [tokenizer.decode(ids[keep]).removesuffix(tokenizer.eos_token) for ids, keep in zip(response, mask)]
    truth = [row["reward_model"]["ground_truth"] for row in rows for _ in range(GROUP)]
    reward = torch.tensor([exact_answer(a, t) for a, t in zip(answers, truth)]).view(-1, GROUP)
    advantage = ((reward - reward.mean(1, True)) / (reward.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    logits = model(torch.cat([prompt, response], 1), use_cache=False).logits[:, prompt.shape[1] - 1:-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, response.unsqueeze(-1)).squeeze(-1)
    ratio = (logprobs - logprobs.detach()).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    (loss * mask).sum().div(mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return int(mask.sum())


def bare_generate(model, prompt, eos: int):
    """Sample ``[rows, <= MAX_NEW]`` tokens with a static cache until every row has ended."""
    import torch
    from transformers import StaticCache
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + MAX_NEW)
        logits = model(prompt, past_key_values=cache, use_cache=True).logits[:, -1]
        done, out = torch.zeros(len(prompt), dtype=torch.bool), []
        for _ in range(MAX_NEW):
            token = torch.multinomial(logits.softmax(-1), 1).masked_fill(done.unsqueeze(1), eos)
            out.append(token)
            done |= token.squeeze(1) == eos
            if bool(done.all()):
                break
            logits = model(token, past_key_values=cache, use_cache=True).logits[:, -1]
        return torch.cat(out, 1)


def trainer_metrics(model: str, data: str, steps: int, ranks: int, script: list[str], flags: list[str]) -> list[dict]:
    """Run a training script; return the metrics of ``steps`` steps, after two that warm up."""
    flags = ["--pretrain", model, "--prompt_data", data, "--max_steps", str(steps + 2), *flags]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    threads = {"OMP_NUM_THREADS": str(max(1, THREADS // ranks))}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launch, *script, *flags, "--save_path", folder]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | threads, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"the trainer failed:\n{done.stderr[-4000:]}")
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] > 2]


def trainer_run(model: str, data: str, steps: int, ranks: int) -> tuple[float, int]:
    """Measure seconds and generated tokens of ``steps`` steps of the trainer."""
    lines = trainer_metrics(model, data, steps, ranks, ["-m", "lightrft.cli.train"], FLAGS)
    return sum(line["time/step_s"] for line in lines), int(sum(line["rollout/tokens"] for line in lines))


def warm_model(folder: Path, digits: int = 3) -> tuple[str, str]:
    """Make the quickstart's model with its supervised warm-up; return its folder and its training prompts."""
    return warm_example(folder, "quickstart", ["--digits", str(digits)])


def warm_example(folder: Path, example: str, sizes: list[str], more: str = "") -> tuple[str, str]:
    """Do the first two steps of ``example``, with ``more`` flags of the warm-up; return as :func:`warm_model`."""
    base, data, sft = str(folder / "base"), folder / "data", str(folder / "sft")
    prepare = [f"examples/{example}/prepare.py", "--out", str(folder), *sizes]
    flags = f"--train_batch_size 32 --learning_rate 3e-3 --max_len 128 --disable_ckpt {more}".split()
    warm_up = ["-m", "lightrft.cli.train_sft", "--pretrain", base, "--train_data", str(data / "sft.parquet"), *flags]
    for words in (prepare, [*warm_up, "--save_path", sft]):
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
                              capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"the warm-up failed:\n{done.stderr[-4000:]}")
    return str(folder / "sft" / "hf"), str(data / "train.parquet")


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each run")
    parser.add_argument("--pairs", type=int, default=3, help="repetitions; the median ratio counts")
    parser.add_argument("--bare", nargs=2, metavar=("MODEL", "DATA"), help=argparse.SUPPRESS)
    parser.add_argument("--warm", nargs=2, metavar=("MODEL", "DATA"),
                        help="a warmed-up quickstart model and its prompts")
    args = parser.parse_args()
    if args.bare:
        print(json.dumps(bare_run(*args.bare, args.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(*(args.warm or warm_model(Path(folder))), args.steps, args.pairs)


def compare(model: str, data: str, steps: int, pairs: int) -> None:
    """Run the three in turn and print milliseconds per step, microseconds per token and the ratios to the bare loop."""
    runs: dict[str,
               list[tuple[float,
                          int]]] = {"bare loop, 1 process": [], "trainer, 1 process": [], "trainer, 2 ranks FSDP2": []}
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS)}
    for _ in range(pairs):
        command = [sys.executable, __file__, "--steps", str(steps), "--bare", model, data]
        out = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
        runs["bare loop, 1 process"].append(tuple(json.loads(out.splitlines()[-1])))
        runs["trainer, 1 process"].append(trainer_run(model, data, steps, 1))
        runs["trainer, 2 ranks FSDP2"].append(trainer_run(model, data, steps, 2))
    base = [seconds / tokens for seconds, tokens in runs["bare loop, 1 process"]]
    print(f"| {'':24} | ms / step | us / token | time at equal tokens, ratio to the bare loop (median of {pairs}) |\n"
          "|---|---|---|---|")
    for name, found in runs.items():
        per_token = [seconds / tokens for seconds, tokens in found]
        ratio = statistics.median(a / b for a, b in zip(per_token, base))
        step_ms = statistics.median(seconds for seconds, _ in found) / steps * 1e3
        print(f"| {name:24} | {step_ms:9.0f} | {statistics.median(per_token) * 1e6:10.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
