"""Repeat a rollout under other latencies of its tools: tokens that differ, and wall time against the longest chain.

    python benchmarks/tool_timing.py [--engine hf] [--bf16] [--responses 32] [--tokens 96] [--latency_s 20]
        [--apart] [--runs 2] [--hidden 128] [--layers 2] [--out tool_timing.json]

The model and the prompts are those of ``turns.py``. The first run has tools that answer at once; in each further run
every answer takes a random while of up to ``--latency_s`` seconds, in which its thread sleeps. Nothing but time
differs, so responses should be the same. From the first token on that differs, all tokens of a response count as
different. The chain of a response is the sum of its latencies; a rollout cannot take less than the longest one.
``--apart`` takes the time out: all tools answer at once, and the prompts are run one after another instead of all
together. What changes then is the rounding of passes with fewer rows. ``--out`` adds the runs to those of a file.
"""
import random
import tempfile
import time
import zlib
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from turns import Case, parser_of, record

from lightrft.environments.base import EnvironmentSpec, Step, Task, Turn

if TYPE_CHECKING:
    from lightrft.types import Episode

COLUMNS = ("engine, dtype", "responses, turns", "drawn tokens", "responses that differ", "tokens that differ",
           "largest change of a log-prob", "longest chain, s", "wall, s", "ratio")  # yapf: disable
HEADER = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|"


class Late:
    """Answers every turn after a random while."""

    def reset(self, prompt: Task, seed: int) -> None:
        """Begin; the label of the prompt is the longest while, in seconds."""
        self.longest, self.random = float(prompt.label), random.SystemRandom()

    def step(self, turn: Turn) -> Step:
        """Answer a turn."""
        while_s = self.random.uniform(0, self.longest)
        time.sleep(while_s)
        return Step(f"go {zlib.crc32(turn.text.encode()) % 100000:05d}", metrics={"slept_s": while_s})


def run(case: Case, tokens: int, latency_s: float) -> "tuple[float, list[Episode]]":
    """Generate all responses; return wall seconds, and the responses."""
    case.prompts = [(number, replace(prompt, label=str(latency_s))) for number, prompt in case.prompts]
    start = time.monotonic()
    _, _, episodes = case.generate(tokens)
    return time.monotonic() - start, episodes


def run_apart(case: Case, tokens: int) -> "tuple[float, list[Episode]]":
    """Generate the responses to one prompt after the other; return wall seconds, and the responses."""
    prompts, parts = case.prompts, []
    for prompt in prompts:
        case.prompts = [prompt]
        parts.append(run(case, tokens, 0.0))
    case.prompts = prompts
    return sum(wall for wall, _ in parts), [episode for _, episodes in parts for episode in episodes]


def against(base: "list[Episode]", wall_s: float, episodes: "list[Episode]") -> dict[str, float]:
    """Compare the responses of a run with those of tools that answered at once."""
    pairs = [*zip(base, episodes, strict=True)]
    same = [sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(one.token_ids, other.token_ids)))
            for one, other in pairs]  # yapf: disable
    plays = [episode.play for episode in episodes if episode.play is not None]
    gaps = [abs(a - b) for (one, other), length in zip(pairs, same)
            for a, b in zip(one.logprobs[:length], other.logprobs[:length])]  # yapf: disable
    return {
        "drawn": sum(one.drawn_len for one in base),
        "turns": sum(play.turns for play in plays) / len(plays),
        "responses": sum(one.token_ids != other.token_ids for one, other in pairs),
        "tokens": sum(sum(one.loss_mask[length:]) for (one, _), length in zip(pairs, same)),
        "logprob": max(gaps),
        "chain": max(play.metrics["slept_s"] for play in plays),
        "wall": wall_s,
    }


def row(title: str, runs: list[dict[str, float]]) -> str:
    """Render the runs of one engine and dtype: sums of what differs, and the run with the worst ratio."""
    engine, dtype, responses, *control = title.split(", ")
    waits = ["", "", ""]
    if not control:
        worst = max(runs, key=lambda one: one["wall"] / one["chain"])
        waits = [f"{worst['chain']:.1f}", f"{worst['wall']:.1f}", f"{worst['wall'] / worst['chain']:.2f}"]
    cells = [", ".join([engine, dtype, *control]), f"{responses.split()[0]} x {len(runs)}, {runs[0]['turns']:.1f}",
             f"{sum(one['drawn'] for one in runs):.0f}", f"{sum(one['responses'] for one in runs):.0f}",
             f"{sum(one['tokens'] for one in runs):.0f}", f"{max(one['logprob'] for one in runs):.0e}",
             *waits]  # yapf: disable
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, and print the table."""
    parser = parser_of(__doc__, responses=32, tokens=96, stops=12, runs=2, hidden=128, layers=2)
    parser.add_argument("--engine", choices=("hf", "vllm", "sglang"), default="hf")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--apart", action="store_true", help="one prompt at a time, in place of latencies")
    parser.add_argument("--latency_s", type=float, default=20.0, help="longest while of one answer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        case = Case(Path(folder) / "model", args, EnvironmentSpec(__file__, "Late"), args.bf16)
        try:
            _, base = run(case, args.tokens, 0.0)
            runs = [against(base, *(run_apart(case, args.tokens) if args.apart else
                                    run(case, args.tokens, args.latency_s))) for _ in range(args.runs)]  # yapf: disable
        finally:
            case.player.shutdown()
            case.engine.shutdown()
    title = f"{args.engine}, {'bfloat16' if args.bf16 else 'float32'}, {args.responses} responses"
    title += ", prompt by prompt" * args.apart
    print(HEADER, row(title, runs), sep="\n")
    record(args.out, title, runs)


if __name__ == "__main__":
    main()
