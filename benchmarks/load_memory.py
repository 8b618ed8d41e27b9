"""Measure the host memory that a rank takes to load its models, from a checkpoint in bfloat16 on one machine.

    python benchmarks/load_memory.py [--ranks 1,2,4] [--layers 8] [--strategy fsdp|zero3]

A policy and its reference are generated, loaded and sharded on the CPU, where what a rank keeps counts as host memory
too. ``whole``: every rank reads both models in float32 before any is sharded; earlier versions did that. ``slices``:
one model after the other, and each rank reads its rows; that is the trainer's :func:`build_models`. Memory is the rise
of the peak resident size over the size before; the rank with the most counts. The bar is its share of both models + the
largest tensor + 10 %; a peak of ``slices`` above it is an error (exit code 1). Each line runs in processes of its own.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from lightrft.config.schema import Config
from lightrft.config.tree import build
from lightrft.models.loader import load_actor
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.strategy.sharding import full_shape
from lightrft.strategy.strategy import get_strategy
from lightrft.trainer.rl_models import build_models, Models

MIB = 1 << 20
STRATEGIES = {"fsdp": {"strategy": "fsdp"}, "zero3": {"strategy": "deepspeed", "zero_stage": 3}}
SIZES = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads":
    12, "max_position_embeddings": 4096, "tie_word_embeddings": False
}  # 70 million parameters with 8 layers


def whole(config: Config) -> Models:
    """Read both models."""
    path = config.model.pretrain
    return Models(load_actor(config.model), None, load_actor(config.model, path, train=False))


def status(key: str) -> int:
    """Bytes of a memory entry of this process."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key + ":"))


def own_bytes(strategy: StrategyBase, prepared: list[Prepared]) -> int:
    """Bytes of the weights that this rank keeps."""
    return sum(piece.tensor.nbytes for each in prepared for _, part in strategy.own_slices(each.model)
               for piece in part.pieces)


def measure(way: str, chosen: str, folder: str) -> None:
    """Load in one way on the ranks of this process group; rank 0 prints the most of any rank."""
    torch.set_num_threads(1)
    config = build(Config, {"pretrain": folder, "init_kl_coef": 0.1, **STRATEGIES[chosen]})
    strategy = get_strategy(config.strategy)
    strategy.setup()
    strategy.prepare(partial(load_actor, config.model, f"{folder}/tiny", deferred=True))  # whatever is loaded once
    strategy.barrier()
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")  # resets the peak
    models = whole(config) if way == "whole" else build_models(config, strategy)
    found = [strategy.prepare(model) for model in (models.actor, models.reference) if model is not None]
    peak, share = status("VmHWM") - before, own_bytes(strategy, found)
    largest = max(full_shape(param).numel() * 4 for param in found[0].model.parameters())
    ranks = strategy.all_gather_object((peak, 1.1 * (share + largest)))
    if strategy.is_main:
        print(json.dumps(dict(zip(("peak", "bar"), (max(values) / MIB for values in zip(*ranks))))))
    strategy.teardown()


def run(way: str, chosen: str, ranks: int, folder: str) -> dict[str, float]:
    """Measure one way in processes of its own."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    command = [sys.executable, *launcher, __file__, "--way", way, "--strategy", chosen, "--folder", folder]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def write_model(folder: str, **changes: int) -> float:
    """Write a checkpoint; return the MiB of its weights in float32."""
    hf = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES | changes), dtype=torch.bfloat16)
    hf.save_pretrained(folder)
    return 4 * sum(param.numel() for param in hf.parameters()) / MIB


def table(counts: list[int], chosen: str, folder: str) -> list[str]:
    """Print one line per number of ranks; return a sentence for each whose ``slices`` take more than the bar."""
    print("| ranks | whole, MiB per rank | slices, MiB per rank | limit |\n|---|---|---|---|")
    over = []
    for ranks in counts:
        before, after = (run(way, chosen, ranks, folder) for way in ("whole", "slices"))
        print(f"| {ranks} | {before['peak']:.0f} | {after['peak']:.0f} | {after['bar']:.0f} |", flush=True)
        if after["peak"] > after["bar"]:
            over.append(f"{chosen}, {ranks} rank{'s' if ranks > 1 else ''}: loading takes {after['peak']:.0f} MiB of "
                        f"host memory per rank, more than its share + the largest tensor + 10 % = "
                        f"{after['bar']:.0f} MiB")
    return over


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        SystemExit: a rank took more than the bar.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model, 27 MiB each")
    parser.add_argument("--strategy", choices=tuple(STRATEGIES), default="fsdp")
    parser.add_argument("--way", choices=("whole", "slices"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.way:
        measure(args.way, args.strategy, args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(folder, num_hidden_layers=args.layers)
        write_model(f"{folder}/tiny", num_hidden_layers=1, vocab_size=64)
        print(f"one model: {size:.0f} MiB of float32 weights")
        over = table([int(ranks) for ranks in args.ranks.split(",")], args.strategy, folder)
    if over:
        raise SystemExit("\n".join(over))


if __name__ == "__main__":
    main()
