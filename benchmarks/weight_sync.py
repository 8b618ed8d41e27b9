"""Compare a weight sync with a plain copy of the same bytes, paired in one run, for several bucket sizes.

    python benchmarks/weight_sync.py [--size 0.5b] [--engine hf] [--ranks 1 2] [--buckets 16 64 256 512 1024]
        [--repeats 5]

A random model of Qwen2.5-0.5B's shape in float32, sharded by FSDP2 (one rank: whole), and on every rank an engine with
its own weights: HF, or vLLM, which runs in the same process. "plain copy" writes as many bytes from host memory into
the same engine, on all ranks at once; "per tensor" gathers every tensor alone. "proof" is what the fingerprints of all
weights cost on top. Rounds of all variants are repeated; the table shows medians, and of the ratios the median over
rounds. The limit is 2x. Between ranks the weights have to travel: "all-gather" is that alone, in pieces of 4 MiB into
one buffer, without any copy.
"""
import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from lightrft.config.schema import RolloutConfig, StrategyConfig
from lightrft.models.actor_language import ActorLanguage
from lightrft.ops.rounding import Arithmetic
from lightrft.rollout.engine import RolloutEngine
from lightrft.rollout.engines import get_engine
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.weight_sync.verify import get_weight_sync_verifier
from lightrft.rollout.weight_sync.sync import sync_weights
from lightrft.strategy.collectives import ALL_GATHER
from lightrft.strategy.strategy import get_strategy
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.types import Prompt
from lightrft.utils.timer import Timer

SIZES = {
    "quickstart": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
                   "intermediate_size": 256, "vocab_size": 64},
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864, "vocab_size": 151936},
}  # yapf: disable
PIECE = 1 << 20  # floats
LENGTHS = {"prompt_max_len": 64, "generate_max_len": 64}
NO_TOKENIZER = SimpleNamespace(eos_token_id=None)
Variant = Callable[[], object]


def model_of(size: str, device: torch.device) -> ActorLanguage:
    """Build a model with random weights."""
    config = Qwen2Config(tie_word_embeddings=True, **SIZES[size])
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="packed", dtype=torch.float32)
    return ActorLanguage(model)


def engine_of(kind: str, size: str, actor: ActorLanguage, strategy: StrategyBase) -> RolloutEngine:
    """Build an engine for ``actor``, with its own random weights."""
    if kind == "hf":
        return HFEngine(model_of(size, strategy.device).hf_model.requires_grad_(False), [], 1 << 24, owns_model=True)
    config = actor.hf_model.config
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        config.name_or_path = folder
        return get_engine(RolloutConfig(engine_type=kind, engine_kv_mib=64, **LENGTHS), actor, strategy, NO_TOKENIZER)


def all_gather(numel: int, strategy: StrategyBase) -> Variant:
    """Make a function that gathers every rank's share of ``numel`` floats on all ranks."""
    share = PIECE // strategy.world_size
    mine = torch.ones(share, device=strategy.device)
    full = torch.empty(share * strategy.world_size, device=strategy.device)

    def run() -> None:
        for _ in range(numel // len(full)):
            ALL_GATHER(full, mine)

    return run


def variants(prepared: Prepared, engine: RolloutEngine, strategy: StrategyBase,
             buckets: list[int]) -> tuple[dict[str, Variant], int]:
    """Make the timed functions, by name; also return the bytes of the engine's weights."""
    proof = get_weight_sync_verifier(RolloutConfig(sync_proof="fingerprint"), strategy, prepared, engine,
                                     [Prompt("0", [1, 2, 3], "")], Arithmetic(strategy.device.type, "float32"), Timer())
    targets = [parameter.detach() for parameter in engine.model.parameters()]
    sources = [target.clone() for target in targets]

    def plain() -> None:
        for target, source in zip(targets, sources):
            target.copy_(source)

    def sync(mib: float) -> Variant:
        return lambda: sync_weights(strategy, prepared, engine, 1, mib)

    found: dict[str, Variant] = {"plain copy": plain}
    if strategy.world_size > 1:
        found["all-gather"] = all_gather(sum(t.numel() for t in targets), strategy)
    found |= {"per tensor": sync(0)} | {f"buckets of {mib} MiB": sync(mib) for mib in buckets}
    return found | {"proof": lambda: proof.check(1)}, sum(t.numel() * t.element_size() for t in targets)


def measure(strategy: StrategyBase, found: dict[str, Variant], repeats: int) -> dict[str, list[float]]:
    """Measure the seconds of every round; a variant begins and ends on all ranks together."""
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(repeats + 1):
        for name, variant in found.items():
            strategy.barrier()
            start = time.perf_counter()
            variant()
            strategy.barrier()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}  # the first round warms up


def table(seconds: dict[str, list[float]], nbytes: int, ranks: int) -> str:
    """Render Markdown: one row per variant."""
    rows = [f"| {ranks} rank{'s, FSDP2' if ranks > 1 else ''} | ms | GB/s | plain copies |", "|---|---|---|---|"]
    for name, values in seconds.items():
        middle = statistics.median(values)
        ratio = statistics.median(value / plain for value, plain in zip(values, seconds["plain copy"]))
        rows.append(f"| {name} | {middle * 1e3:.4g} | {nbytes / middle / 1e9:.2f} | {ratio:.2f}x |")
    return "\n".join([*rows, ""])


def worker(args: argparse.Namespace) -> None:
    """Measure on one rank, and print on rank 0."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = get_strategy(StrategyConfig())
    strategy.setup()
    torch.manual_seed(0)
    prepared = strategy.prepare(model_of(args.size, strategy.device))
    engine = engine_of(args.engine, args.size, prepared.model, strategy)
    found, nbytes = variants(prepared, engine, strategy, args.buckets)
    seconds = measure(strategy, found, args.repeats)
    if strategy.is_main:
        print(f"{args.size}: {nbytes / 2**20:.4g} MiB of weights in {args.engine}, medians of {args.repeats} rounds\n")
        print(table(seconds, nbytes, ranks), flush=True)
    engine.shutdown()
    strategy.teardown()


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="0.5b", help="shape of the model")
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf", help="where the weights go")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure")
    parser.add_argument("--buckets", type=int, nargs="+", default=[16, 64, 256, 512, 1024], help="bucket sizes in MiB")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    for ranks in args.ranks:
        flags = ["--worker", "--size", args.size, "--engine", args.engine, "--repeats", str(args.repeats), "--buckets",
                 *map(str, args.buckets)]  # yapf: disable
        launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        subprocess.run([sys.executable, *launcher, __file__, *flags], check=True,
                       env={**os.environ, "OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    main()
