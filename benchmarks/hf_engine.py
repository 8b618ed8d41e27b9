"""Compare HFEngine with ``model.generate``: the same model, prompts, threads and key-value memory, paired in one run.

    python benchmarks/hf_engine.py [--repeats 3] [--seconds 40] [--rows 64] [--prompt 128] [--threads 2]

The model draws a number log-uniformly from 8 to 256 and counts down from it to its end token. So the model decides the
lengths, and they spread over that range within every group. Its embedding and head are set by hand, not trained
(attention and MLP run as in any model, their last matrices are 0). For equal lengths it runs without an end token.
``generate`` gets static batches of as many rows as the memory holds at the longest length (its best case: prompts of
one length, no padding, no log-probs); the engine gets the same bytes. 64 prompts x 8 samples, 32 x 8 for the larger
model; about three minutes on two free cores.
"""
import argparse
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

import lightrft.models.attention  # noqa: F401  (registers "packed")
from lightrft.rollout import generate, SamplingParams
from lightrft.rollout.hf.engine import HFEngine
from lightrft.types import Episode, Prompt

SHORTEST, LONGEST = 8, 256
END = 0  # token n > 0 says "n are left"; the prompts use the tokens after LONGEST
SAMPLES = 8
PROMPTS = {"quickstart": 64, "hidden 256": 32}
SIZES = {
    "quickstart": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256},
    "hidden 256": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024},
}


@torch.no_grad()
def counting_model(size: dict[str, int]) -> PreTrainedModel:
    """Build a model: k - 1 follows token k, and n a prompt with probability ~ 1 / n, SHORTEST <= n + 1 <= LONGEST."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=LONGEST + 33, num_key_value_heads=size["num_attention_heads"],
                         tie_word_embeddings=False, **size)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    prompt = F.normalize(torch.randn(config.hidden_size), dim=0)
    numbers = torch.randn(config.vocab_size, config.hidden_size)
    numbers = F.normalize(numbers - (numbers @ prompt)[:, None] * prompt)  # orthogonal to the prompt's direction
    model.model.embed_tokens.weight.copy_(numbers)
    model.model.embed_tokens.weight[LONGEST + 1:] = prompt
    prior = torch.full((config.vocab_size, ), -40.0)
    prior[SHORTEST - 1:LONGEST] = -torch.arange(SHORTEST - 1, LONGEST).log()
    norm = config.hidden_size**0.5  # of the hidden state after the final RMSNorm
    model.lm_head.weight.copy_(numbers.roll(-1, 0) * 40 / norm + prior[:, None] * prompt / norm)
    return model.eval()


def random_prompts(length: int) -> list[Prompt]:
    """Make prompts of ``length`` tokens, as many as the smallest model gets."""
    rng = random.Random(1)
    return [Prompt("", [LONGEST + 1 + rng.randrange(32) for _ in range(length)], "")
            for _ in range(max(PROMPTS.values()))]  # yapf: disable


def new_episodes(prompts: Sequence[Prompt], samples: int) -> list[Episode]:
    """Make unfinished episodes of every prompt; all seeds differ."""
    return [Episode(prompt, i, j, seed=samples * i + j) for i, prompt in enumerate(prompts) for j in range(samples)]


def run_generate(model: PreTrainedModel, prompts: list[Prompt], rows: int, new: int, end: int | None) -> list[int]:
    """Run ``model.generate`` and return the lengths of its responses, in static batches of ``rows``."""
    model.set_attn_implementation("sdpa")
    lengths = []
    for batch in torch.tensor([prompt.token_ids for prompt in prompts for _ in range(SAMPLES)]).split(rows):
        out = model.generate(batch, attention_mask=torch.ones_like(batch), do_sample=True, temperature=1.0, top_k=0,
                             top_p=1.0, max_new_tokens=new, eos_token_id=end, pad_token_id=LONGEST + 1)
        out = out[:, batch.shape[1]:]
        ended = (out == END) if end is not None else torch.zeros_like(out, dtype=torch.bool)
        lengths += [int(row.nonzero()[0]) + 1 if row.any() else new for row in ended]
    return lengths


def run_engine(model: PreTrainedModel, prompts: list[Prompt], kv_bytes: int, new: int, end: int | None) -> list[int]:
    """Run the HF engine within ``kv_bytes`` and return the lengths of its responses."""
    model.set_attn_implementation("packed")
    engine = HFEngine(model, [] if end is None else [end], kv_bytes)
    generate(engine, episodes := new_episodes(prompts, SAMPLES), SamplingParams(new))
    return [episode.response_len for episode in episodes]


def timed(clock: Any, function: Any, *args: Any) -> tuple[float, list[int]]:
    """Call ``function``; return its tokens per second of ``clock``, and the lengths."""
    start = clock()
    lengths = function(*args)
    return sum(lengths) / (clock() - start), lengths


def compare(model: PreTrainedModel, prompts: list[Prompt], args: argparse.Namespace, end: int | None) -> dict[str, Any]:
    """Run paired repetitions; return medians of tokens/s and all ratios."""
    config, new = model.config, LONGEST if end is not None else LONGEST // 2
    per_token = 2 * 4 * config.num_hidden_layers * config.hidden_size
    kv_bytes = args.rows * (args.prompt + new - 1) * per_token
    run_engine(model, prompts[:2], kv_bytes, 4, end), run_generate(model, prompts[:2], args.rows, 4, end)  # warm up
    clock = time.process_time if args.cpu_clock else time.perf_counter
    slow, fast, start = [], [], time.perf_counter()
    while not fast or (len(fast) < args.repeats and time.perf_counter() - start < args.seconds):
        slow.append(timed(clock, run_generate, model, prompts, args.rows, new, end))
        fast.append(timed(clock, run_engine, model, prompts, kv_bytes, new, end))
    return {
        "MiB": kv_bytes / 2**20,
        "lengths": fast[0][1],
        "baseline": slow[0][1],
        "generate": statistics.median(speed for speed, _ in slow),
        "engine": statistics.median(speed for speed, _ in fast),
        "ratios": [f[0] / s[0] for s, f in zip(slow, fast)],
    }


def spread(lengths: list[int]) -> str:
    """Format the shortest, mean and longest length."""
    return f"{min(lengths)} / {statistics.mean(lengths):.0f} / {max(lengths)}"


def main() -> None:
    """Print one line per model and kind of lengths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="most paired repetitions of a line")
    parser.add_argument("--seconds", type=float, default=40, help="after these a line begins no further repetition")
    parser.add_argument("--rows", type=int, default=64,
                        help="rows of generate's static batches; sets the memory of both")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of every prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-clock", action="store_true",
                        help="CPU seconds, not wall time (busy machine, --threads 1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    prompts = random_prompts(args.prompt)
    print(f"{SAMPLES} samples per prompt; tokens/s and ratio are medians; lengths are min / mean / max")
    print(f"{'model':<12}{'lengths':<9}{'KV MiB':>7}{'generate':>10}{'engine':>9}{'ratio':>8}  {'all ratios':<20}"
          f"{'engine lengths':<18}generate lengths")
    for name, size in SIZES.items():
        model = counting_model(size)
        for kind, end in (("natural", END), ("equal", None)):
            r = compare(model, prompts[:PROMPTS[name]], args, end)
            ratios, ratio = " ".join(f"{each:.2f}" for each in r["ratios"]), statistics.median(r["ratios"])
            print(
                f"{name:<12}{kind:<9}{r['MiB']:>7.1f}{r['generate']:>10.0f}{r['engine']:>9.0f}"
                f"{ratio:>7.2f}x  {ratios:<20}{spread(r['lengths']):<18}{spread(r['baseline'])}", flush=True)


if __name__ == "__main__":
    main()
