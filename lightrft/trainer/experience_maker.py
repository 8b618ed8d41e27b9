"""Turns prompts into experience, in stages: generate, reward, pack, gather, log-probs and values, advantages.

``NaiveExperienceMaker`` runs the stages one after the other, :class:`.fast_exp_maker.FastExperienceMaker` overlaps
them. The result is the same. ``GreedyBaseline`` adds the greedy response of every prompt, whose reward is the baseline
of ReMax (arXiv:2310.10505).
"""
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import Config
from lightrft.ops.segment import segment_sum
from lightrft.rewards.base import Score
from lightrft.rewards.manager import RewardManager
from lightrft.rollout.engine import Request, RolloutEngine, SamplingParams
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.advantage_calculator import AdvantageCalculator, fill_reward_parts
from lightrft.trainer.logprob_pass import LogprobPass
from lightrft.trainer.metric_sums import response_metrics, reward_metrics
from lightrft.trainer.replay_buffer import MicroBatchLimits, ReplayBuffer
from lightrft.trainer.samples import (Ended, pack_samples, reward_input, Rows, sample_seed, set_rewards, stop_token_ids,
                                      to_samples)
from lightrft.types import Experience, Prompt, Sample
from lightrft.utils.timer import Timer


class GreedyBaseline:
    """Generates and scores one greedy response per prompt, with the weights and the rewards of the samples.

    It is not a sample: it is not trained on, and it enters no group and no metric of samples.
    """

    def __init__(self, engine: RolloutEngine, rewards: RewardManager, tokenizer: PreTrainedTokenizerBase) -> None:
        self.engine, self.rewards, self.tokenizer = engine, rewards, tokenizer

    def start(self, samples: list[Sample], sampling: SamplingParams) -> Callable[[], dict[int, dict[str, Any]]]:
        """Answer the prompts of this rank's ``samples`` greedily and start scoring.

        Args:
            sampling: parameters of the samples; length and stop tokens are taken from them.

        Returns:
            A function that waits for the scores: group id -> entries for the rows of the group.
        """
        params = SamplingParams(sampling.max_new_tokens, temperature=0.0, stop_token_ids=sampling.stop_token_ids)
        prompts = {sample.group_id: sample.prompt for sample in samples}
        requests = [Request(prompt.token_ids, [0], prompt.media) for prompt in prompts.values()]
        ended = ((*prompt, 0, done[0]) for prompt, done in zip(prompts.items(), self.engine.generate(requests, params)))
        greedy = to_samples(self.tokenizer, ended, self.engine.weight_version, params.stop_token_ids)
        handle = self.rewards.submit([reward_input(sample.prompt, sample.text) for sample in greedy])
        return lambda: {
            sample.group_id: {"greedy_reward": score.total, "greedy_length": sample.response_len}
            for sample, score in zip(greedy, self.rewards.wait(handle))
        }


@dataclass
class Rollout:
    """Rollout batch of all ranks, ready for the update and equal on every rank. Without rows there is no update."""
    exp: Experience
    buffer: ReplayBuffer
    rows: Rows  # in the order of ``exp``
    metrics: dict[str, float] = field(default_factory=dict)


class NaiveExperienceMaker:
    """Runs the stages of one rollout, in order.

    Prompts are dealt to ranks one by one; a prompt's group stays on its rank while it is generated and scored. Then
    every rank gathers the whole batch, so that batch statistics, mini-batches and balance do not depend on the ranks.
    """

    def __init__(self, config: Config, strategy: StrategyBase, engine: RolloutEngine, rewards: RewardManager,
                 tokenizer: PreTrainedTokenizerBase, logprobs: LogprobPass, calculator: AdvantageCalculator,
                 timer: Timer, greedy: GreedyBaseline | None = None) -> None:
        self.config, self.strategy, self.engine, self.rewards = config, strategy, engine, rewards
        self.tokenizer, self.logprobs, self.calculator, self.timer = tokenizer, logprobs, calculator, timer
        self.greedy = greedy
        rollout = config.rollout
        self.sampling = SamplingParams(rollout.generate_max_len, rollout.temperature, rollout.top_p, rollout.top_k,
                                       rollout.min_p, stop_token_ids(rollout.stop, tokenizer),
                                       rollout.first_token_temperature if rollout.use_fire else None)
        self.limits = MicroBatchLimits(config.train.micro_train_batch_size, config.train.max_tokens_per_micro_batch)

    def limit_responses(self, max_len: int) -> None:
        """Limit responses to ``max_len`` tokens from now on."""
        self.sampling = replace(self.sampling, max_new_tokens=max_len)
        self.calculator.max_len = max_len

    def make(self, prompts: list[Prompt], step: int, kl_coef: float = 0.0) -> Rollout:
        """Make one rollout over the global batch ``prompts`` (the same list on every rank)."""
        exp, rows = self.generate(list(enumerate(prompts)), step)
        return self.complete(exp, rows, step, kl_coef)

    def generate(self, groups: list[tuple[int, Prompt]], step: int | str) -> tuple[Experience, Callable[[], Rows]]:
        """Generate responses to numbered prompts of all ranks, packed by number.

        Args:
            step: part of each sample's seed, with the numbers of the prompt and of the sample.

        Returns:
            The packed samples, and a function that waits for their rewards.
        """
        with self.timer("rollout"):  # it ends when the slowest rank is done
            samples = self.generate_samples(groups[self.strategy.rank::self.strategy.world_size], step)
            self.strategy.barrier()
        baseline = self._answer_greedily(samples)
        with self.timer("gather"):
            exp = self._gather(pack_samples(samples, self.config.rollout.n_samples_per_prompt))
        return exp, lambda: self._gather_rows(samples, baseline)

    def _answer_greedily(self, samples: list[Sample]) -> Callable[[], dict[int, dict[str, Any]]]:
        """Start the greedy baseline of each group, if needed; the function returned waits for its row entries."""
        if self.greedy is None:
            return dict
        with self.timer("greedy"):
            baseline = self.greedy.start(samples, self.sampling)
            self.strategy.barrier()
        return baseline

    def complete(self, exp: Experience, rows_of: Callable[[], Rows], step: int, kl_coef: float = 0.0) -> Rollout:
        """Put the engine to sleep, then fill log-probs, values, rewards and advantages of ``exp``."""
        self.engine.sleep()
        buffer = self.buffer(exp, step)
        self.logprobs.fill(exp, buffer, self.timer)
        rows = rows_of()
        metrics = response_metrics(exp, self.timer.seconds("rollout"))
        with self.timer("advantage"):
            metrics |= self._advantages(exp, rows, kl_coef)
        return Rollout(exp, buffer, rows, metrics)

    def generate_samples(self, groups: list[tuple[int, Prompt]], step: int | str) -> list[Sample]:
        """Generate the responses to this rank's prompts, group by group."""
        completions = self.engine.generate(self._requests(groups, step), self.sampling)
        return self.samples_of(
            (*group, j, done) for group, responses in zip(groups, completions) for j, done in enumerate(responses))

    def score(self, samples: list[Sample]) -> list[Score]:
        """Return the rewards of this rank's samples."""
        return self.rewards.collect(
            self.rewards.submit([reward_input(sample.prompt, sample.text) for sample in samples]))

    def samples_of(self, ended: Iterable[Ended]) -> list[Sample]:
        """Convert finished responses of this rank to samples."""
        return to_samples(self.tokenizer, ended, self.engine.weight_version, self.sampling.stop_token_ids)

    def _requests(self, groups: list[tuple[int, Prompt]], step: int | str) -> list[Request]:
        seed, n = self.config.train.seed, self.config.rollout.n_samples_per_prompt
        return [
            Request(prompt.token_ids, [sample_seed(seed, step, group_id, j) for j in range(n)], prompt.media)
            for group_id, prompt in groups
        ]

    def _gather(self, local: Experience) -> Experience:
        """Gather the whole batch on every rank, in the order of ``sample_ids``."""
        parts = self.strategy.all_gather_object(local)
        if len(parts) == 1:
            return local
        exp = Experience.cat(parts)
        return exp.select(exp.sample_ids.argsort().tolist())

    def _gather_rows(self, samples: list[Sample], baseline: Callable[[], dict[int, dict[str, Any]]]) -> Rows:
        """Gather the scores of all ranks, in the order of ``sample_ids``."""
        with self.timer("reward"):
            more = baseline()
            local = [
                self._row(sample, score) | more.get(sample.group_id, {})
                for sample, score in zip(samples, self.score(samples))
            ]
            rows = [row for part in self.strategy.all_gather_object(local) for row in part]
        return sorted(rows, key=lambda row: (row["group_id"], row["index"]))

    def _row(self, sample: Sample, score: Score) -> dict[str, Any]:
        row = {"group_id": sample.group_id, "index": sample.index, "reward": score.total, "parts": score.parts,
               "weights": score.weights, "error": score.error, "finish_reason": sample.finish_reason,
               "uid": sample.prompt.uid}  # yapf: disable
        if self.config.log.save_trajectories:
            row |= {"prompt": sample.prompt.text, "response": sample.text, "reference": sample.prompt.reference}
        return row

    def buffer(self, exp: Experience, step: int) -> ReplayBuffer:
        """Return the plan that cuts the rollout of a step into passes."""
        train = self.config.train
        return ReplayBuffer(exp.seq_lens, train.train_batch_size, self.limits, self.strategy.rank,
                            self.strategy.world_size, f"{train.seed}/{step}")

    def _advantages(self, exp: Experience, rows: Rows, kl_coef: float) -> dict[str, float]:
        set_rewards(exp, rows)
        metrics = reward_metrics(rows) | fill_reward_parts(exp, rows, self.calculator.estimator)
        metrics |= self.calculator(exp, kl_coef)
        kept = segment_sum(exp.loss_mask.float(), exp.cu_seqlens) > 0
        return metrics | {"rollout/kept_samples": kept.sum().item()}
