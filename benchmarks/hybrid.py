"""Measure what shared prompts save in a model whose layers have a state, and compare the gradients.

    python benchmarks/hybrid.py [--rounds 5] [--group 8] [--prompts 2] [--prompt 256] [--response 64] [--out FILE]

A random Qwen3.5 (three delta-rule layers and one of attention, 256 wide) runs forward and backward on ``prompts``
prompts with ``group`` responses each, in one micro-batch. Each round runs both ways one after the other in this
process: ``shared``, where a prompt runs once and hands its state to its responses, and ``apart``, where each response
has its own copy. ``row`` are the tokens of the packed row; ``delta`` those that a delta-rule layer computes, with the
padding of its rows; ``cpu_s`` the CPU seconds. The gradients of both ways are compared in float64, because those of the
decays are so small that float32 rounds their third digit. One minute.
"""
import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peers import machine
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from lightrft.models.actor_language import ActorLanguage
from lightrft.tests.support.recurrence import in_double
from lightrft.types import Experience

WAYS = ("shared", "apart")
VOCAB = 512


def build() -> ActorLanguage:
    """Return the actor, always with the same weights."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(vocab_size=VOCAB, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
                               num_attention_heads=4, num_key_value_heads=2, head_dim=64, linear_num_key_heads=4,
                               linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32,
                               max_position_embeddings=4096)  # yapf: disable
    return ActorLanguage(AutoModelForCausalLM.from_config(config, attn_implementation="packed"))


def batch(prompts: int, group: int, prompt: int, response: int) -> Experience:
    """Pack ``group`` random responses to each of ``prompts`` random prompts."""
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(5, VOCAB, (count, ), generator=draw).tolist()  # type: ignore[no-any-return]

    heads = [tokens(prompt) for _ in range(prompts)]
    rows = [head + tokens(response) for head in heads for _ in range(group)]
    mask = [False] * prompt + [True] * response
    return Experience.pack(rows, [mask] * len(rows), prompt_lens=[prompt] * len(rows))


def measure(actor: ActorLanguage, exp: Experience, way: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Run forward and backward once; return the tokens and CPU seconds, and the gradients."""
    actor.share_prompts, layer = way == "shared", actor.hf_model.model.layers[0]
    counts = {"row": 0, "delta": 0}
    hooks = [module.register_forward_hook(lambda _, args, out, name=name: _count(counts, name, out))
             for name, module in (("row", layer.mlp), ("delta", layer.linear_attn.in_proj_qkv))]  # yapf: disable
    actor.zero_grad()
    start = time.process_time()
    actor(exp.to("cpu"))[0].sum().backward()
    spent = time.process_time() - start
    for hook in hooks:
        hook.remove()
    grads = {name: weight.grad for name, weight in actor.named_parameters() if weight.grad is not None}
    return counts | {"cpu_s": spent}, grads


def _count(counts: dict[str, int], name: str, out: Tensor) -> None:
    counts[name] += out.shape[:-1].numel()


def largest_gap(actor: ActorLanguage, exp: Experience) -> float:
    """Return the largest difference between the gradients of both ways, in float64, relative to the largest element of
    the gradient of a weight."""
    with in_double(actor.double()):
        shared, apart = (measure(actor, exp, way)[1] for way in WAYS)
    assert shared.keys() == apart.keys()
    return max(float((shared[name] - grad).abs().max() / grad.abs().max()) for name, grad in apart.items())


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds after one that warms up."""
    actor, exp = build(), batch(args.prompts, args.group, args.prompt, args.response)
    found: dict[str, Any] = {way: [] for way in WAYS}
    for number in range(args.rounds + 1):
        for way in WAYS if number % 2 else WAYS[::-1]:
            found[way] += [measure(actor, exp, way)[0]] * (number > 0)
    return found | {"gradient_gap": largest_gap(actor, exp)}


def table(found: dict[str, Any]) -> str:
    """Format the medians as rows of Markdown."""
    lines = ["| way | tokens of the row | tokens of a delta-rule layer | CPU s |", "|---|---|---|---|"]
    for way in WAYS:
        row, delta, spent = (statistics.median(one[name] for one in found[way]) for name in ("row", "delta", "cpu_s"))
        lines.append(f"| {way} | {row:,.0f} | {delta:,.0f} | {spent:.2f} |")
    pairs = list(zip(found["shared"], found["apart"]))
    ratios = [apart["cpu_s"] / shared["cpu_s"] for shared, apart in pairs]
    row, delta = (pairs[0][1][name] / pairs[0][0][name] for name in ("row", "delta"))
    span = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return "\n".join([*lines, f"| apart / shared | {row:.2f} | {delta:.2f} | {span} |"])


def main(words: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompts", type=int, default=2, help="prompts")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response")
    parser.add_argument("--out", type=Path, help="JSON file of all results")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    found = run(args)
    if args.out:
        args.out.write_text(json.dumps(machine() | found, indent=1) + "\n")
    sys.stdout.write(f"{table(found)}\nlargest difference of a gradient: {found['gradient_gap']:.1e} of its weight's "
                     "largest element\n")


if __name__ == "__main__":
    main()
