"""Measure how much of a slow reward generation hides, if rewards begin with every response or every group.

    python benchmarks/early_rewards.py [--pairs 3] [--groups 32x8,8x32] [--slots 256,64] [--shares 0.5,1] [--workers 4]

The smaller model of ``hf_engine.py`` counts down from a number that it draws log-uniformly from 8 to 256. The reward is
a file whose function takes one response and sleeps, in real worker processes. Its work is the time that all of them
need together, a share of the time of generation. Waiting is the time from the end of generation to the last reward.
Hidden is the share of the work that is not waited for. Medians of pairs, in alternating order. Three minutes on two
free cores.
"""
import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from hf_engine import END, LONGEST, SIZES, counting_model, new_episodes

import torch
from lightrft.config.schema import RewardConfig
from lightrft.rewards.base import RewardInput
from lightrft.rewards.manager import Handle, RewardManager
from lightrft.rollout import generate, SamplingParams
from lightrft.rollout.hf.engine import HFEngine
from lightrft.rollout.scheduler import Round
from lightrft.types import Episode, Prompt

PROMPT = 16
CODE = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep({seconds})
    return 1.0
"""


class Ways:
    """One rollout whose rewards begin with responses or with groups."""

    def __init__(self, groups: int, samples: int, slots: int) -> None:
        self.prompts, self.samples = [Prompt("", [LONGEST + 1 + i % 32] * PROMPT, "") for i in range(groups)], samples
        self.inputs = [[RewardInput(str(i), str(j)) for j in range(samples)] for i in range(groups)]
        model = counting_model(SIZES["quickstart"])
        model.set_attn_implementation("packed")
        per_token = 2 * 4 * model.config.num_hidden_layers * model.config.hidden_size
        self.engine = HFEngine(model, [END], slots * (PROMPT + LONGEST - 1) * per_token)

    def generation(self) -> float:
        """Seconds of generation without rewards."""
        start = time.perf_counter()
        generate(self.engine, new_episodes(self.prompts, self.samples), SamplingParams(LONGEST))
        return time.perf_counter() - start

    def waiting(self, rewards: RewardManager, early: bool) -> float:
        """Seconds from the end of generation to the last reward."""
        handles = [Handle() for _ in self.prompts]

        def begin(episodes: Iterable[Episode]) -> None:
            rewards.begin([(handles[each.group_id], each.index, self.inputs[each.group_id][each.index])
                           for each in episodes])

        def heard(finished: Round) -> None:
            begin(finished.episodes if early else chain.from_iterable(finished.groups))
            for group in finished.groups:
                rewards.finish(handles[group[0].group_id])

        generate(self.engine, new_episodes(self.prompts, self.samples), SamplingParams(LONGEST), heard=heard)
        start = time.perf_counter()
        scored = [score.total for handle in handles for score in rewards.collect(handle)]
        assert scored == [1.0] * sum(map(len, self.inputs))
        return time.perf_counter() - start


def line(ways: Ways, name: str, share: float, workers: int, pairs: int) -> str:
    """Measure one row of the table."""
    generation = statistics.median(ways.generation() for _ in range(3))
    count, found = sum(map(len, ways.inputs)), []
    seconds = share * generation * workers / count
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "slow.py")
        file.write_text(CODE.format(seconds=seconds), encoding="utf-8")
        rewards = RewardManager(RewardConfig(reward=[str(file)], reward_workers=workers))
        for number in range(pairs):
            order = (False, True) if number % 2 else (True, False)
            waited = {early: ways.waiting(rewards, early) for early in order}
            found.append((waited[False], waited[True]))
        rewards.shutdown()
    group, response = map(statistics.median, zip(*found))
    work = share * generation
    return (f"| {name} | {generation:.1f} | {work:.1f} | {group:.1f} | {response:.1f} | {1 - group / work:.0%} | "
            f"{1 - response / work:.0%} |")


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--groups", default="32x8,8x32", help="prompts x samples, with commas")
    parser.add_argument("--slots", default="256,64", help="responses under way at once")
    parser.add_argument("--shares", default="0.5,1", help="of the time of generation that the reward takes")
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| groups | slots | generation, s | reward, s | waiting by group, s | by response, s | hidden by group | "
          "by response |")
    print("|---|---|---|---|---|---|---|---|")
    for groups in args.groups.split(","):
        for slots in map(int, args.slots.split(",")):
            ways = Ways(*map(int, groups.split("x")), slots)
            ways.generation()  # warms up
            for share in map(float, args.shares.split(",")):
                print(line(ways, f"{groups} | {slots}", share, args.workers, args.pairs), flush=True)


if __name__ == "__main__":
    main()
