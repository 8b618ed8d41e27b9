"""Batch inference: responses of an engine to many prompts, scored, written as soon as they are."""
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from transformers import PreTrainedTokenizerBase

from lightrft.datasets.answered import unscored
from lightrft.environments.play import Player
from lightrft.rewards.base import RewardInput, Score
from lightrft.rewards.manager import Handle, RewardManager
from lightrft.rollout.engine import RolloutEngine, SamplingParams
from lightrft.rollout.scheduler import generate, Round
from lightrft.inference.media_columns import MediaColumns
from lightrft.inference.row_files import Row, RowFiles
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.environment import turns_of
from lightrft.trainer.samples import decode, judged, reward_input, sample_seed
from lightrft.trainer.scores import trajectory
from lightrft.types import Episode, Prompt
from lightrft.utils.play import Play
from lightrft.utils.progress import progress
from lightrft.utils.watchdog import stop_requested, tick

GROUPS_PER_CALL = 1024  # prompts of a rank in one call of the engine, which ends with its slowest response
RESPONSES_PER_CALL = 4096  # and their responses
WAITING = GROUPS_PER_CALL  # groups without scores, at most: a reward model scores when somebody waits for it
Group = tuple[list[Row], list[RewardInput]]  # rows, and the input of the reward for each


class ScoredWriter:
    """Writer of groups of rows, each when its scores are there.

    Args:
        rewards: score the responses; None: rows are written without a reward.
        groups: that this rank will add.
    """

    def __init__(self, files: RowFiles, rewards: RewardManager | None, groups: int, desc: str) -> None:
        self.files, self.rewards = files, rewards
        self._waiting: deque[tuple[int, list[Row], Handle]] = deque()
        self._bar = progress(groups, desc, unit="row")

    def add(self, number: int, rows: list[Row], asked: list[RewardInput]) -> None:
        """Take a group; ``asked`` has the input of the reward for each row."""
        if self.rewards is None:
            self._write(number, rows)
        else:
            self._waiting.append((number, rows, self.rewards.submit(asked)))
            self.drain(lambda handle: handle.ready or len(self._waiting) >= WAITING)

    def drain(self, due: Callable[[Handle], bool] = lambda handle: True) -> None:
        """Write the waiting groups up to the first one that is not ``due``; wait for their scores."""
        while self.rewards is not None and self._waiting and due(self._waiting[0][2]):
            number, rows, handle = self._waiting.popleft()
            scores = self.rewards.collect(handle)
            self._write(number, [row | scored(score) for row, score in zip(rows, scores, strict=True)])

    def _write(self, number: int, rows: list[Row]) -> None:
        tick()
        self.files.add(number, rows)
        self._bar.update(1)

    def close(self) -> None:
        """End the bar."""
        self._bar.close()


def scored(score: Score) -> Row:
    """Return the columns of a score: ``reward`` (None: unscored, with its cause) and its parts, whose names say which
    rule has judged the response."""
    found: Row = {"reward": score.total, "reward_parts": score.parts}
    return found | ({"unscored": score.error} if score.total is None else {})


def score_groups(strategy: StrategyBase, numbers: Sequence[int], group: Callable[[int], Group], files: RowFiles,
                 rewards: RewardManager | None) -> bool:
    """Score groups that have their responses, on all ranks; a collective.

    Returns:
        False if a stop request has ended it early.
    """
    mine = strategy.mesh.engines.of(numbers)
    writer = ScoredWriter(files, rewards, len(mine), "scoring")
    for number in mine:
        if stop_requested():
            break
        writer.add(number, *group(number))
    writer.drain()
    writer.close()
    return not strategy.any_rank(stop_requested())


def score_again(strategy: StrategyBase, prompts: Sequence[Prompt], files: RowFiles,
                rewards: RewardManager | None) -> bool:
    """Score the responses that an earlier run has left ``unscored`` in ``files``; see :func:`score_groups`."""

    def group(number: int) -> Group:
        rows = [unscored(row) for row in files.unscored[number]]
        return rows, [reward_input(prompts[number], row["output"], Play.load(row.get("play"))) for row in rows]

    return score_groups(strategy, sorted(files.unscored), group, files, rewards)


class BatchGenerator:
    """Generates ``n`` responses to each prompt, on all ranks.

    The seed of a response depends on ``seed``, its prompt and its number alone: neither the ranks nor a resumed run
    change a response.

    Args:
        media: writes the media of the prompts.
        environment: answers the turns of the responses.
    """

    def __init__(self, strategy: StrategyBase, engine: RolloutEngine, tokenizer: PreTrainedTokenizerBase,
                 sampling: SamplingParams, n: int, seed: int, media: MediaColumns,
                 environment: Player | None = None) -> None:
        self.strategy, self.engine, self.tokenizer = strategy, engine, tokenizer
        self.sampling, self.n, self.seed, self.media, self.environment = sampling, n, seed, media, environment

    def run(self, prompts: Sequence[Prompt], files: RowFiles, rewards: RewardManager | None) -> bool:
        """Answer the prompts that ``files`` does not have; a collective.

        Returns:
            False if a stop request has ended it early.
        """
        known = files.done.union(files.unscored)
        todo = [number for number in range(len(prompts)) if number not in known]
        writer = ScoredWriter(files, rewards, -(-len(todo) // self.strategy.mesh.engines.size), "generation")
        size = max(1, min(GROUPS_PER_CALL, RESPONSES_PER_CALL // self.n)) * self.strategy.mesh.engines.size
        for start in range(0, len(todo), size):
            if self.strategy.any_rank(stop_requested()):
                break
            mine = self.strategy.mesh.engines.of(todo[start:start + size])
            self._call([(number, prompts[number]) for number in mine], writer)
        writer.close()
        return not self.strategy.any_rank(stop_requested())

    def _call(self, numbered: list[tuple[int, Prompt]], writer: ScoredWriter) -> None:
        """Generate the responses of some prompts in one call; a request to stop ends it early."""
        episodes = [Episode(prompt, number, j, seed=sample_seed(self.seed, prompt.uid, j)) for number, prompt in
                    numbered for j in range(self.n)]  # yapf: disable

        def heard(finished: Round) -> bool:
            for samples in finished.groups:
                decode(self.tokenizer, samples, self.sampling.stop_token_ids)
                writer.add(samples[0].group_id, [self.row(sample) for sample in samples],
                           [judged(sample) for sample in samples])
            return bool(finished.groups) and stop_requested()

        with turns_of(self.environment, self.tokenizer, episodes, self.sampling.max_new_tokens) as (turns, hears_cuts):
            generate(self.engine, episodes, self.sampling, turns, heard, hears_cuts)
        writer.drain()

    def row(self, sample: Episode) -> Row:
        """Return the row of a response. With media the prompt is there as messages too, with the columns of those and
        what their template was given."""
        prompt = sample.first_prompt
        found: Row = {"input": prompt.text, "output": sample.text, "prompt_id": prompt.uid, "sample": sample.index,
                      "tokens": sample.drawn_len, "finish_reason": sample.finish_reason}  # yapf: disable
        if prompt.media:
            kwargs = {name: value for name, value in prompt.template_kwargs.items() if name != "tools"}
            given = {"tools": prompt.template_kwargs.get("tools"), "chat_template_kwargs": kwargs}
            found |= {"prompt": prompt.messages or prompt.text, **self.media.of(prompt.media)}
            found |= {name: value for name, value in given.items() if value}
        if sample.play is not None:
            found |= trajectory(sample) | {"play": asdict(replace(sample.play, asked=None, parsed=[], shown=[]))}
        facts = {"data_source": prompt.data_source, "label": prompt.label, "reference": prompt.reference}
        return found | {name: value for name, value in facts.items() if value not in (None, "")}
