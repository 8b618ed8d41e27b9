"""Compare responses of several turns with an environment to responses of one turn with it, and without one.

    python benchmarks/turns.py [--engine hf] [--responses 64] [--tokens 256] [--stops 3] [--pairs 3] [--hidden 256]
        [--layers 4] [--out turns.json]

The model has random weights and one token per character; a turn ends with one of ``--stops`` characters. The
environment answers every turn at once, with 8 characters, in a worker process; what the policy reads of an answer has
31 tokens. Each pair generates three times, with the same prompts and as many tokens: responses of several turns; of one
turn, at whose end the same environment is asked once; and without an environment, so that nothing reads the text. CPU
seconds are those of this process and the worker; the table has medians, and the ratios their least and most. ``--out``
adds the pairs to those of a file.
"""
import argparse
import json
import os
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, TYPE_CHECKING

from lightrft.environments.base import EnvironmentSpec, Step, Turn

if TYPE_CHECKING:
    from lightrft.models.actor_language import ActorLanguage
    from lightrft.rollout.engine import RolloutEngine
    from lightrft.types import Episode

SAMPLES, LIMIT = 8, 2048
COLUMNS = ("engine, model", "turns", "tokens, drawn", "several turns, CPU s", "of the worker", "one turn, CPU s",
           "of the worker", "ratio", "no environment, CPU s", "ratio")  # yapf: disable
HEADER = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|"


class Answers:
    """Answers every turn, hardly ever with the same text."""

    def reset(self, prompt: object, seed: int) -> None:
        """Begin."""

    def step(self, turn: Turn) -> Step:
        """Answer a turn."""
        return Step(f"go {zlib.crc32(turn.text.encode()) % 100000:05d}")


class Case:
    """A model with an engine, prompts, and an environment in a worker."""

    def __init__(self, folder: Path, args: argparse.Namespace, spec: EnvironmentSpec, bf16: bool = False) -> None:
        import torch
        from lightrft.config.schema import ModelConfig
        from lightrft.environments.chat_format import ChatFormat
        from lightrft.environments.play import Player
        from lightrft.environments.pool import EnvironmentPool
        from lightrft.models.loader import load_actor
        from lightrft.tests.support import tool_models
        from lightrft.types import Prompt
        tool_models.save_model(folder, "qwen2", hidden_size=args.hidden, num_hidden_layers=args.layers,
                               max_position_embeddings=LIMIT)
        actor = load_actor(ModelConfig(pretrain=str(folder)), dtype=torch.bfloat16 if bf16 else torch.float32)
        self.size = sum(weight.numel() for weight in actor.hf_model.parameters())
        self.tokenizer = tool_models.tokenizer()
        self.engine = engine_of(args.engine, actor, self.tokenizer, bf16)
        form = ChatFormat(self.tokenizer, "qwen2")  # no thoughts, in which a turn could end
        self.player = Player(EnvironmentPool(spec, 1, 600.0), self.tokenizer, form, 1 << 30, 1 << 30)
        texts = [form.prompt([{"role": "user", "content": f"question {i}"}], {})
                 for i in range(args.responses // SAMPLES)]  # yapf: disable
        self.prompts = [(i, Prompt(str(i), ids, text, messages=[{"role": "user", "content": f"question {i}"}]))
                        for i, (text, ids) in enumerate(texts)]
        self.stops = tuple(self.tokenizer.convert_tokens_to_ids([*"etaoinshrdlu"[:args.stops]]))

    def generate(self, tokens: int, stops: bool = True, plays: bool = True) -> "tuple[float, float, list[Episode]]":
        """Generate responses of ``tokens``; return CPU seconds of this process and of the worker, and the responses.

        Args:
            stops: turns end with one of the characters; else the only turn is as long as the response.
            plays: with the environment.
        """
        from lightrft.rollout.engine import SamplingParams
        from lightrft.trainer.samples import respond
        params = SamplingParams(tokens, stop_token_ids=self.stops if stops else ())
        seeds = [[SAMPLES * i + j for j in range(SAMPLES)] for i, _ in self.prompts]
        worker, start = self.worker_s(), time.process_time()
        episodes = respond(self.engine, self.tokenizer, self.player if plays else None, self.prompts, seeds, params,
                           "turns")  # yapf: disable
        return time.process_time() - start, self.worker_s() - worker, episodes

    def worker_s(self) -> float:
        """Return the CPU seconds of the worker so far."""
        pid, = self.player.pool.pids
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def pair(self, tokens: int) -> dict[str, float]:
        """Generate responses of several turns, and both kinds of one turn."""
        process, worker, episodes = self.generate(tokens)
        length, drawn = (statistics.mean(getattr(episode, name) for episode in episodes)
                         for name in ("response_len", "drawn_len"))  # yapf: disable
        measured = {"turns": _turns(episodes), "tokens": length, "drawn": drawn, "several": process + worker,
                    "several_worker": worker}  # yapf: disable
        for name, plays in (("one", True), ("alone", False)):
            process, worker, episodes = self.generate(round(length), stops=False, plays=plays)
            assert {episode.response_len for episode in episodes} == {round(length)}
            assert _turns(episodes) == plays
            measured[name] = (process + worker) * length / round(length)
            measured[f"{name}_worker"] = worker
        return measured


def _turns(episodes: "list[Episode]") -> float:
    """Return the mean number of turns that the environment has read."""
    return statistics.mean(episode.play.turns if episode.play is not None else 0 for episode in episodes)


def engine_of(kind: str, actor: "ActorLanguage", tokenizer: Any, bf16: bool) -> "RolloutEngine":
    """Start an engine on the weights of ``actor``, that no token of the model itself ends."""
    from lightrft.config.schema import RolloutConfig
    from lightrft.rollout import get_engine
    from lightrft.config.schema import StrategyConfig
    from lightrft.strategy.strategy import SingleProcessStrategy
    actor.hf_model.eval()
    strategy = SingleProcessStrategy(StrategyConfig())
    strategy.setup()
    cfg = RolloutConfig(engine_type=kind, prompt_max_len=LIMIT // 2, generate_max_len=LIMIT // 2, engine_kv_mib=256)
    engine = get_engine(cfg, actor, strategy, tokenizer, bf16)
    engine.eos_token_ids = frozenset()
    engine.update_weights(strategy.full_params(actor), 1)
    return engine


def row(title: str, pairs: list[dict[str, float]]) -> str:
    """Render the pairs of one engine and model."""
    median = {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]}
    cells = [title, f"{median['turns']:.1f}", f"{median['tokens']:.0f}, {median['drawn']:.0f}",
             *_seconds(median, "several"), *_seconds(median, "one"), _ratio(pairs, "one"), f"{median['alone']:.2f}",
             _ratio(pairs, "alone")]  # yapf: disable
    return f"| {' | '.join(cells)} |"


def _seconds(median: dict[str, float], name: str) -> list[str]:
    return [f"{median[name]:.2f}", f"{median[f'{name}_worker']:.2f}"]


def _ratio(pairs: list[dict[str, float]], name: str) -> str:
    ratios = [pair["several"] / pair[name] for pair in pairs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def parser_of(doc: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Return a parser with the first line of ``doc``, options of whole numbers, and that of the record."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, help="JSON file of all runs")
    return parser


def record(path: Path | None, title: str, runs: list[Any]) -> None:
    """Write the runs of a row into the record, in place of earlier ones."""
    if path is not None:
        recorded = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(recorded | {title: runs}, indent=1) + "\n")


def main() -> None:
    """Measure, and print the table."""
    parser = parser_of(__doc__, responses=64, tokens=256, stops=3, pairs=3, hidden=256, layers=4)
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder) / "model", args, EnvironmentSpec(__file__, "Answers"))
        case.pair(args.tokens)  # warms up
        pairs = [case.pair(args.tokens) for _ in range(args.pairs)]
        case.player.shutdown()
        case.engine.shutdown()
    title = f"{args.engine}, {case.size / 1e6:.1f}M parameters, {args.responses} responses"
    print(HEADER, row(title, pairs), sep="\n")
    record(args.out, title, pairs)


if __name__ == "__main__":
    main()
