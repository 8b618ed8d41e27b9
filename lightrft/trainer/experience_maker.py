"""Prompts to experience, stage by stage: generate, reward, pack, gather, log-probs and values, advantages.

``NaiveExperienceMaker`` runs the stages one after the other, :class:`.fast_exp_maker.FastExperienceMaker` overlaps
them. What comes out is the same.
"""
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import Config
from lightrft.ops.segment import segment_sum
from lightrft.rewards.base import RewardInput, Score
from lightrft.rewards.manager import RewardManager
from lightrft.rollout.engine import Completion, Request, RolloutEngine, SamplingParams
from lightrft.strategy.strategy_base import StrategyBase
from lightrft.trainer.advantage_calculator import AdvantageCalculator
from lightrft.trainer.estimator_inputs import fill_inputs
from lightrft.trainer.logprob_pass import LogprobPass
from lightrft.trainer.replay_buffer import MicroBatchLimits, ReplayBuffer
from lightrft.trainer.rollout_metrics import response_metrics, reward_metrics
from lightrft.types import Experience, Prompt, Sample
from lightrft.utils.errors import UserError
from lightrft.utils.timer import Timer

if TYPE_CHECKING:
    from lightrft.trainer.greedy_baseline import GreedyBaseline

Rows = list[dict[str, Any]]  # one per sample: text, parts, error ...
Ended = tuple[int, Prompt, int, Completion]  # number of the group, its prompt, place in the group, response


@dataclass
class Rollout:
    """One rollout batch of all ranks, ready for the update: the same on every rank. Without rows there is none."""
    exp: Experience
    buffer: ReplayBuffer
    rows: Rows  # in the order of ``exp``
    metrics: dict[str, float] = field(default_factory=dict)


def sample_seed(*path: int | str) -> int:
    """A 63-bit seed from a path such as (run seed, step, group, sample): the same on every rank and machine."""
    digest = hashlib.blake2b("/".join(map(str, path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stop_token_ids(stop: list[str], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The token of every stop string; a string that is not exactly one token is an error."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in stop]
    for text, tokens in zip(stop, ids):
        if len(tokens) != 1:
            raise UserError(
                f"--stop {text!r} is {len(tokens)} tokens of this tokenizer; a stop string must be exactly one")
    return tuple(tokens[0] for tokens in ids)


def reward_input(prompt: Prompt, response: str) -> RewardInput:
    """What a reward sees of a response, which never contains the prompt."""
    return RewardInput(prompt=prompt.text, response=response, messages=prompt.messages, data_source=prompt.data_source,
                       label=prompt.label, reference=prompt.reference, columns=prompt.columns)


def to_samples(tokenizer: PreTrainedTokenizerBase, ended: Iterable[Ended], weight_version: int,
               stop: tuple[int, ...] = ()) -> list[Sample]:
    """Finished responses as samples, decoded. Special tokens are kept, only the end token goes; ``stop`` stays."""
    ended, kept = list(ended), set(stop) - {tokenizer.eos_token_id}
    bodies = [
        done.token_ids[:-1] if done.finish_reason == "stop" and done.token_ids[-1] not in kept else done.token_ids
        for *_, done in ended
    ]
    texts = tokenizer.batch_decode(bodies, skip_special_tokens=False)
    return [
        Sample(prompt=prompt, group_id=group_id, index=index, token_ids=prompt.token_ids + done.token_ids,
               loss_mask=[False] * len(prompt.token_ids) + [True] * len(done.token_ids),
               logprobs=[0.0] * len(prompt.token_ids) + done.logprobs,
               weight_versions=[-1] * len(prompt.token_ids) + [weight_version] * len(done.token_ids),
               finish_reason=done.finish_reason, text=text)
        for (group_id, prompt, index, done), text in zip(ended, texts)
    ]


def pack_samples(samples: list[Sample], n_per_prompt: int) -> Experience:
    """Samples as one packed Experience on the CPU; rewards come later."""

    def flat(name: str, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.fromiter(chain.from_iterable(getattr(sample, name) for sample in samples), dtype))

    lens = torch.tensor([0] + [len(sample.token_ids) for sample in samples])
    return Experience(
        token_ids=flat("token_ids", np.int64),
        cu_seqlens=lens.cumsum(0).to(torch.int32),
        loss_mask=flat("loss_mask", np.bool_),
        group_ids=torch.tensor([s.group_id for s in samples], dtype=torch.long),
        sample_ids=torch.tensor([s.group_id * n_per_prompt + s.index for s in samples], dtype=torch.long),
        truncated=torch.tensor([s.finish_reason == "length" for s in samples], dtype=torch.bool),
        weight_versions=flat("weight_versions", np.int32),
        rollout_logprobs=flat("logprobs", np.float32),
    )


def set_rewards(exp: Experience, rows: Rows) -> None:
    """Fill ``scored`` and ``rewards`` (not shaped yet)."""
    exp.scored = torch.tensor([row["reward"] is not None for row in rows], dtype=torch.bool)
    exp.rewards = torch.tensor([row["reward"] or 0.0 for row in rows], dtype=torch.float32)


class NaiveExperienceMaker:
    """The stages of one rollout, in order.

    Prompts are dealt to ranks one by one; a prompt's group stays on its rank while it is generated and scored. Then
    every rank gathers the whole batch, so that batch statistics, mini-batches and balance do not depend on the ranks.
    """

    def __init__(self, config: Config, strategy: StrategyBase, engine: RolloutEngine, rewards: RewardManager,
                 tokenizer: PreTrainedTokenizerBase, logprobs: LogprobPass, calculator: AdvantageCalculator,
                 timer: Timer, greedy: "GreedyBaseline | None" = None) -> None:
        self.config, self.strategy, self.engine, self.rewards = config, strategy, engine, rewards
        self.tokenizer, self.logprobs, self.calculator, self.timer = tokenizer, logprobs, calculator, timer
        self.greedy = greedy
        rollout = config.rollout
        self.sampling = SamplingParams(rollout.generate_max_len, rollout.temperature, rollout.top_p, rollout.top_k,
                                       rollout.min_p, stop_token_ids(rollout.stop, tokenizer),
                                       rollout.first_token_temperature if rollout.use_fire else None)
        self.limits = MicroBatchLimits(config.train.micro_train_batch_size, config.train.max_tokens_per_micro_batch)

    def limit_responses(self, max_len: int) -> None:
        """Let responses have at most ``max_len`` tokens from now on."""
        self.sampling = replace(self.sampling, max_new_tokens=max_len)
        self.calculator.max_len = max_len

    def make(self, prompts: list[Prompt], step: int, kl_coef: float = 0.0) -> Rollout:
        """One rollout over the global batch ``prompts`` (the same list on every rank)."""
        exp, rows = self.generate(list(enumerate(prompts)), step)
        return self.complete(exp, rows, step, kl_coef)

    def generate(self, groups: list[tuple[int, Prompt]], step: int | str) -> tuple[Experience, Callable[[], Rows]]:
        """Responses to numbered prompts of all ranks, packed by number; the function waits for their rewards.

        Args:
            step: with the number of a prompt and of a sample it makes the sample's seed.
        """
        with self.timer("rollout"):  # it ends when the slowest rank is done
            samples = self.generate_samples(groups[self.strategy.rank::self.strategy.world_size], step)
            self.strategy.barrier()
        baseline = self._answer_greedily(samples)
        with self.timer("gather"):
            exp = self._gather(pack_samples(samples, self.config.rollout.n_samples_per_prompt))
        return exp, lambda: self._gather_rows(samples, baseline)

    def _answer_greedily(self, samples: list[Sample]) -> Callable[[], dict[int, dict[str, Any]]]:
        """What the rows of each group get from its prompt's greedy response; nothing where none is needed."""
        if self.greedy is None:
            return dict
        with self.timer("greedy"):
            baseline = self.greedy.start(samples, self.sampling)
            self.strategy.barrier()
        return baseline

    def complete(self, exp: Experience, rows_of: Callable[[], Rows], step: int, kl_coef: float = 0.0) -> Rollout:
        """What comes after generation, with the engine asleep: ``exp`` with log-probs, values, rewards, advantages."""
        self.engine.sleep()
        buffer = self.buffer(exp, step)
        self.logprobs.fill(exp, buffer, self.timer)
        rows = rows_of()
        metrics = response_metrics(exp, self.timer.seconds("rollout"))
        with self.timer("advantage"):
            metrics |= self._advantages(exp, rows, kl_coef)
        return Rollout(exp, buffer, rows, metrics)

    def generate_samples(self, groups: list[tuple[int, Prompt]], step: int | str) -> list[Sample]:
        """Responses of this rank's prompts, group by group."""
        completions = self.engine.generate(self._requests(groups, step), self.sampling)
        return self.samples_of(
            (*group, j, done) for group, responses in zip(groups, completions) for j, done in enumerate(responses))

    def score(self, samples: list[Sample]) -> list[Score]:
        """The rewards of this rank's samples."""
        return self.rewards.collect(
            self.rewards.submit([reward_input(sample.prompt, sample.text) for sample in samples]))

    def samples_of(self, ended: Iterable[Ended]) -> list[Sample]:
        """Finished responses of this rank as samples."""
        return to_samples(self.tokenizer, ended, self.engine.weight_version, self.sampling.stop_token_ids)

    def _requests(self, groups: list[tuple[int, Prompt]], step: int | str) -> list[Request]:
        seed, n = self.config.train.seed, self.config.rollout.n_samples_per_prompt
        return [
            Request(prompt.token_ids, [sample_seed(seed, step, group_id, j) for j in range(n)], prompt.mm_inputs)
            for group_id, prompt in groups
        ]

    def _gather(self, local: Experience) -> Experience:
        """The whole batch on every rank, in the order of ``sample_ids``."""
        parts = self.strategy.all_gather_object(local)
        if len(parts) == 1:
            return local
        exp = Experience.cat(parts)
        return exp.select(exp.sample_ids.argsort().tolist())

    def _gather_rows(self, samples: list[Sample], baseline: Callable[[], dict[int, dict[str, Any]]]) -> Rows:
        """The scores of all ranks, in the order of ``sample_ids``."""
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
        """How the rollout of a step is cut into passes."""
        train = self.config.train
        return ReplayBuffer(exp.seq_lens, train.train_batch_size, self.limits, self.strategy.rank,
                            self.strategy.world_size, f"{train.seed}/{step}")

    def _advantages(self, exp: Experience, rows: Rows, kl_coef: float) -> dict[str, float]:
        set_rewards(exp, rows)
        metrics = reward_metrics(rows) | fill_inputs(exp, rows, self.calculator.estimator)
        metrics |= self.calculator(exp, kl_coef)
        kept = segment_sum(exp.loss_mask.float(), exp.cu_seqlens) > 0
        return metrics | {"rollout/kept_samples": kept.sum().item()}
