"""Compare vLLM through the trainer with bare vLLM: tokens/s of FastExperienceMaker and ``LLM.generate``, paired.

    python benchmarks/rollout_overhead.py [--rounds 6] [--prompts 64] [--samples 8] [--max_new_tokens 64]

The trainer starts one vLLM engine for the quickstart's warmed-up model; an ``LLM`` object wraps that same engine. Every
round generates the same requests both ways, in alternating order: through the maker (requests, decoding, submitting to
the rewards, samples) and bare. Three further ways are bare too, with other responses: ``n per prompt`` has one request
of n samples for each prompt, ``no seeds`` draws from vLLM's global generator, ``no log-probs`` returns none either.
Times are CPU-seconds of this process, which vary less between rounds than wall time does.
"""
import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bare_loop import warm_model

from lightrft.config.cli import parse_config
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.models.tokenizer import load_tokenizer
from lightrft.rollout.vllm.parts import native_params
from lightrft.trainer.fast_exp_maker import FastExperienceMaker
from lightrft.trainer.session import training_session
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer, build_models
from lightrft.types import Episode, Prompt


def llm_around(native: Any, path: str) -> Any:
    """Make vLLM's public ``LLM`` on an engine that already runs."""
    from vllm import LLM
    from vllm.v1.engine.llm_engine import LLMEngine
    make = LLMEngine.from_engine_args
    LLMEngine.from_engine_args = lambda *args, **kwargs: native
    try:
        return LLM(path, skip_tokenizer_init=True)
    finally:
        LLMEngine.from_engine_args = make


class Ways:
    """Ways to generate the same prompts; each returns the number of its tokens."""

    def __init__(self, maker: FastExperienceMaker, prompts: list[Prompt], llm: Any) -> None:
        self.maker, self.prompts, self.llm, self.wait = maker, prompts, llm, list
        self.seeds = [(group[0].prompt.token_ids, [each.seed for each in group]) for group in self.groups()]
        self.stop_ids = maker.engine.stop_ids(maker.sampling)

    def groups(self) -> list[list[Episode]]:
        """Return new groups of the prompts."""
        return [self.maker.open(i, prompt, 0) for i, prompt in enumerate(self.prompts)]

    def trainer(self) -> int:
        """Generate through the maker. Rewards are collected outside the time: they overlap with training passes."""
        samples, self.wait = self.maker.advance(sum(self.groups(), []), len(self.prompts), set())
        return sum(sample.response_len for sample in samples)

    def bare(self) -> int:
        """Generate with one request per sample, as the trainer's engine makes them."""
        return self._single()

    def unseeded(self) -> int:
        """Generate with one request per sample, none of which has a seed."""
        return self._single(seed=None)

    def tokens_only(self) -> int:
        """Generate with one request per sample, without seeds and log-probs."""
        return self._single(seed=None, logprobs=None)

    def _single(self, **changes: Any) -> int:
        jobs = [({"prompt_token_ids": token_ids}, self._native(seed)) for token_ids, seeds in self.seeds
                for seed in seeds]
        for _, native in jobs:
            for name, value in changes.items():
                setattr(native, name, value)
        return self._generate(*zip(*jobs))

    def grouped(self) -> int:
        """Generate with one request of n samples per prompt."""
        natives = [self._native(seeds[0]) for _, seeds in self.seeds]
        for native, (_, seeds) in zip(natives, self.seeds):
            native.n = len(seeds)
        return self._generate([{"prompt_token_ids": token_ids} for token_ids, _ in self.seeds], natives)

    def _native(self, seed: int) -> Any:
        sampling = self.maker.sampling
        return native_params(sampling, self.stop_ids, sampling.max_new_tokens, seed)

    def _generate(self, prompts: Any, natives: Any) -> int:
        outputs = self.llm.generate(list(prompts), list(natives), use_tqdm=False)
        return sum(len(one.token_ids) for output in outputs for one in output.outputs)


def timed(way: Callable[[], int], collect: Callable[[], Any]) -> tuple[float, int]:
    """Measure CPU-seconds per 1,000 tokens, and the tokens."""
    start = time.process_time()
    tokens = way()
    seconds = time.process_time() - start
    collect()
    return seconds / tokens * 1e3, tokens


def measure(trainer: SPMDPPOTrainer, prompts: list[Prompt], path: str, rounds: int) -> str:
    """Run the rounds and return the table."""
    trainer.sync_weights(0)
    ways = Ways(trainer.maker, prompts, llm_around(trainer.engine.native, path))
    names = {"trainer": ways.trainer, "bare, one request per sample": ways.bare, "bare, n per prompt": ways.grouped,
             "bare, no seeds": ways.unseeded, "bare, no seeds, no log-probs": ways.tokens_only}  # yapf: disable
    costs: dict[str, list[float]] = {name: [] for name in names}
    tokens: dict[str, int] = {}
    for number in range(rounds + 1):  # the first one warms up
        order = list(names) if number % 2 else list(names)[::-1]
        for name in order:
            collect = (lambda: ways.wait()) if name == "trainer" else (lambda: None)
            cost, tokens[name] = timed(names[name], collect)
            costs[name] += [cost] if number else []
            trainer.engine.native.reset_prefix_cache()
    ratios = {name: statistics.median(a / b for a, b in zip(costs[name], costs["bare, one request per sample"]))
              for name in names}  # yapf: disable
    rows = [f"| {name} | {tokens[name]} | {1e3 / statistics.median(costs[name]):.0f} | {ratios[name]:.3f} |"
            for name in names]  # yapf: disable
    return "\n".join(["| way | tokens | tokens per CPU-second | time per token / bare |", "|---|---|---|---|", *rows])


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="measured rounds, each of all ways")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per round")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="most tokens of a response")
    parser.add_argument("--warm", type=Path, help="folder with a warmed-up model (sft/hf) and its prompts (data)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        warm = args.warm
        path, data = (str(warm / "sft/hf"), str(warm / "data/train.parquet")) if warm else warm_model(Path(folder))
        flags = (f"--pretrain {path} --prompt_data {data} --save_path {folder}/run --engine_type vllm --reward exact "
                 f"--rollout_batch_size {args.prompts} --n_samples_per_prompt {args.samples} --train_batch_size "
                 f"{args.prompts * args.samples} --prompt_max_len 64 --generate_max_len {args.max_new_tokens} "
                 "--disable_ckpt --max_steps 1 --sync_proof off --reward_probe False").split()
        parsed = parse_config(flags, prog=sys.argv[0])
        with training_session(parsed) as session:
            config = parsed.config
            tokenizer = load_tokenizer(config.model.pretrain, config.data.chat_template)
            prompts = PromptsDataset(config.data, tokenizer, config.rollout.prompt_max_len)
            trainer = SPMDPPOTrainer(config, session.strategy, build_models(config, session.strategy), tokenizer,
                                     prompts, (), session.timer)
            try:
                print(measure(trainer, [prompts[i] for i in range(args.prompts)], path, args.rounds))
            finally:
                trainer.maker.rewards.shutdown()
                trainer.engine.shutdown()


if __name__ == "__main__":
    main()
