"""Compare responses of several turns with an environment to responses of one turn, at equal numbers of drawn tokens.

    python benchmarks/turns.py [--responses 64] [--tokens 256] [--stops 2] [--pairs 5] [--hidden 64]

The model has random weights and one token per character; a turn ends with one of ``--stops`` characters. The
environment answers every turn at once, with 8 characters, in a worker process. Each pair generates both in turn, and
responses of one turn are as long as those of several turns were on average. CPU seconds are those of this process, and
of the worker apart; the table has the median of the pairs.
"""
import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.environments.base import Step, Turn

if TYPE_CHECKING:
    from lightrft.types import Episode

SAMPLES = 8


class Answers:
    """Answers every turn."""

    def reset(self, prompt: object, seed: int) -> None:
        """Begin."""

    def step(self, turn: Turn) -> Step:
        """Answer a turn."""
        return Step("go on...")


class Case:
    """A model with an engine, prompts, and an environment."""

    def __init__(self, folder: Path, responses: int, stops: int, hidden: int) -> None:
        from lightrft.config.schema import ModelConfig
        from lightrft.environments.base import EnvironmentSpec
        from lightrft.environments.chat_format import ChatFormat
        from lightrft.environments.play import Player
        from lightrft.environments.pool import EnvironmentPool
        from lightrft.models.loader import load_actor
        from lightrft.rollout.hf.engine import HFEngine
        from lightrft.tests.support import tool_models
        from lightrft.types import Prompt
        tool_models.save_model(folder, "qwen2", hidden_size=hidden, max_position_embeddings=4096)
        actor = load_actor(ModelConfig(pretrain=str(folder)))
        self.tokenizer = tool_models.tokenizer()
        self.engine = HFEngine(actor.hf_model.eval(), (), 1 << 28)  # no token ends a response of one turn
        form = ChatFormat(self.tokenizer, "qwen2")  # no thoughts, in which a turn could end
        pool = EnvironmentPool(EnvironmentSpec(__file__, "Answers"), 1, 60.0)
        self.player = Player(pool, self.tokenizer, form, 1 << 30, 1 << 30)
        texts = [form.prompt([{"role": "user", "content": f"question {i}"}], {})
                 for i in range(responses // SAMPLES)]  # yapf: disable
        self.prompts = [(i, Prompt(str(i), ids, text, messages=[{"role": "user", "content": f"question {i}"}]))
                        for i, (text, ids) in enumerate(texts)]
        self.stops = tuple(self.tokenizer.convert_tokens_to_ids([*"etaoinshrdlu"[:stops]]))

    def generate(self, tokens: int, plays: bool) -> "tuple[float, float, list[Episode]]":
        """Generate responses of ``tokens``; return CPU seconds of this process and of the worker, and the responses."""
        from lightrft.rollout.engine import SamplingParams
        from lightrft.trainer.samples import respond
        params = SamplingParams(tokens, stop_token_ids=self.stops if plays else ())
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


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, value in {"responses": 64, "tokens": 256, "stops": 2, "pairs": 5, "hidden": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder) / "model", args.responses, args.stops, args.hidden)
        pairs = []
        for number in range(args.pairs + 1):  # the first one warms up
            several, worker, episodes = case.generate(args.tokens, True)
            drawn = statistics.mean(episode.drawn_len for episode in episodes)
            one, _, alone = case.generate(round(drawn), False)
            turns = statistics.mean(episode.play.turns for episode in episodes if episode.play is not None)
            per_token = one * drawn / statistics.mean(episode.drawn_len for episode in alone)
            pairs += [(turns, drawn, per_token, several, several / per_token, worker)] if number else []
        case.player.shutdown()
    print(
        "| turns | drawn tokens | one turn, CPU s | several, CPU s | ratio | worker, CPU s |\n|---|---|---|---|---|---|"
    )
    turns, drawn, one, several, ratio, worker = map(statistics.median, zip(*pairs))
    print(f"| {turns:.1f} | {drawn:.0f} | {one:.2f} | {several:.2f} | {ratio:.2f} | {worker:.2f} |")


if __name__ == "__main__":
    main()
