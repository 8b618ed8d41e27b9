"""Turns prompts into experience, in stages: generate, reward, move, log-probs and values, advantages.

Each response is reported to listeners as soon as it is finished: rewards are computed, and with ``--overlap_passes``
forward passes run, while the engine still generates the others.
"""
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import Config
from lightrft.models.packed_model import PackedModel
from lightrft.utils.score import Score
from lightrft.rewards.manager import Handle, RewardManager
from lightrft.rollout.engine import RolloutEngine, SamplingParams
from lightrft.rollout.scheduler import generate, Quota, Round
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.advantage_calculator import AdvantageCalculator
from lightrft.environments.play import Player
from lightrft.trainer.environment import AnyEnvironment, turns_of
from lightrft.trainer.logprob_pass import LogprobPass
from lightrft.trainer.metric_sums import number_metrics, response_metrics
from lightrft.trainer.overlapped_passes import OverlappedPasses
from lightrft.trainer.batch_plan import BatchPlan, MicroBatchLimits
from lightrft.trainer.play_metrics import play_metrics
from lightrft.trainer.samples import decode, group_seeds, judged, respond, sampling_params
from lightrft.trainer.scores import fill_rewards, step_rewards, take_scores
from lightrft.trainer.shards import BatchRanks, Shards
from lightrft.types import Batch, by_group, Episode, MediaSource, Prompt, unfinished
from lightrft.utils.lightrft_names import answers_names
from lightrft.utils.progress import phase
from lightrft.utils.timer import Timer

Item = TypeVar("Item")
Wait = Callable[[], None]  # waits until the scores of a generation have come, and sets them


class Listener(Protocol):
    """Listener to the responses of this rank as they finish. Its context is entered around each generation."""

    def during(self, groups: Sequence[int]) -> AbstractContextManager[Any]:
        """Return the context of one generation of the groups with these numbers."""

    def wants_each(self, prompts: Sequence[Prompt]) -> bool:
        """Return True if reports of single responses save time; else whole groups are reported."""

    def arrived(self, samples: list[Episode]) -> None:
        """Receive finished samples."""

    def finished(self, group: int) -> None:
        """Receive the notice that all responses of the group with this number have arrived."""


class RewardListener:
    """Starts scoring as soon as a response is finished if a worker or a server scores single responses, which saves
    time; otherwise as soon as its group is finished."""

    def __init__(self, rewards: RewardManager) -> None:
        self.rewards, self.handles = rewards, dict[int, Handle]()

    def during(self, groups: Sequence[int]) -> AbstractContextManager[Any]:
        """Begin a handle for each group; nothing has to end with the generation."""
        self.handles = {number: Handle() for number in groups}
        return nullcontext()

    def wants_each(self, prompts: Sequence[Prompt]) -> bool:
        """Return True if a reward of a prompt scores single responses early."""
        return self.rewards.begins_early(prompts)

    def arrived(self, samples: list[Episode]) -> None:
        """Begin to score the samples."""
        self.rewards.begin([(self.handles[sample.group_id], sample.index, judged(sample)) for sample in samples])

    def finished(self, group: int) -> None:
        """Score what waits for the whole group."""
        self.rewards.finish(self.handles[group])

    def scores(self) -> list[Score]:
        """Wait for the scores of the last generation, group by group, in the order of the samples' indices."""
        self.rewards.flush()
        return [score for handle in self.handles.values() for score in self.rewards.collect(handle)]


class GreedyBaseline:
    """Generates and scores one greedy response per prompt, with the weights and the rewards of the samples.

    Its reward is the baseline of ReMax (arXiv:2310.10505). It is not a sample: it is not trained on, and it enters no
    group and no metric of samples. It is generated after the samples: with ``--oversample`` nobody knows before which
    groups are finished, and rounds with two sets of sampling parameters cost the hf engine its CUDA graphs.
    """

    def __init__(self, engine: RolloutEngine, rewards: RewardManager, tokenizer: PreTrainedTokenizerBase,
                 environment: AnyEnvironment | None = None) -> None:
        self.engine, self.rewards, self.tokenizer, self.environment = engine, rewards, tokenizer, environment

    def start(self, samples: list[Episode], sampling: SamplingParams) -> Wait:
        """Answer the prompts of this rank's ``samples`` greedily and start scoring.

        Args:
            sampling: parameters of the samples; length and stop tokens are taken from them.

        Returns:
            A function that waits for the scores, and sets ``greedy`` of the samples.
        """
        params = SamplingParams(sampling.max_new_tokens, temperature=0.0, stop_token_ids=sampling.stop_token_ids)
        groups = by_group(samples)
        prompts = [(number, group[0].first_prompt) for number, group in groups.items()]
        greedy = respond(self.engine, self.tokenizer, self.environment, prompts, [[0]] * len(prompts), params, "greedy")
        handle = self.rewards.submit([judged(episode) for episode in greedy])

        def wait() -> None:
            self.rewards.flush()
            for group, episode, score in zip(groups.values(), greedy, self.rewards.collect(handle), strict=True):
                for sample in group:
                    sample.greedy = score.total, episode.drawn_len

        return wait


class GenerationRun:
    """One generation of this rank's ``episodes``, group by group, up to ``quota``; it reports finished ones to the
    listeners."""

    def __init__(self, maker: "FastExperienceMaker", episodes: list[Episode], quota: Quota) -> None:
        self.maker, self.quota, self.episodes, self.groups = maker, quota, episodes, by_group(episodes)
        self.each = maker.reports_each([group[0].prompt for group in self.groups.values()])
        self.reported: set[int] = set()  # identities of episodes
        self.completed: set[int] = set()  # numbers of groups of which listeners have heard
        self.bar = phase(min(quota.groups, len(self.groups)), "rollout", "prompt")

    def run(self) -> list[Episode]:
        """Generate; return the reported episodes."""
        maker = self.maker
        opened = [] if self.quota.met else unfinished(self.episodes)
        with turns_of(maker.environment, maker.tokenizer, opened, maker.sampling.max_new_tokens) as (turns, hears_cuts):
            generate(maker.engine, opened, maker.sampling, turns, self._heard, hears_cuts)
        for number, group in self.groups.items():  # nothing is overlapped, or they finished while the engine stopped
            if number not in self.completed and not unfinished(group):
                self._complete(number)
        self.bar.close()
        return [episode for episode in self.episodes if id(episode) in self.reported]

    def _heard(self, finished: Round) -> bool:
        if self.each:
            self._report(finished.episodes)
        numbers = [episode.group_id for episode, *_ in finished.groups]
        self.bar.update(len(numbers))
        self.quota.finished.update(numbers)
        for number in numbers if self.maker.overlaps else ():
            self._complete(number)
        return self.quota.met

    def _complete(self, number: int) -> None:
        """Report the remaining episodes of a finished group, and the group."""
        self.completed.add(number)
        if rest := [each for each in self.groups[number] if each.score is None and id(each) not in self.reported]:
            self._report(rest)
        for listener in self.maker.listeners:
            listener.finished(number)

    def _report(self, finished: list[Episode]) -> None:
        """Decode finished episodes and report them."""
        decode(self.maker.tokenizer, finished, self.maker.sampling.stop_token_ids)
        self.reported |= {*map(id, finished)}
        for listener in self.maker.listeners:
            listener.arrived(finished)


@dataclass
class Rollout:
    """Rollout batch of all ranks, ready for the update. An empty one makes no update."""
    shards: Shards
    plan: BatchPlan
    episodes: list[Episode]  # those that this rank generated, with their scores; in the batch at ``shards.numbers``
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def exp(self) -> Batch:
        """The sequences that live on this rank."""
        return self.shards.exp


@answers_names
class FastExperienceMaker:
    """Runs the stages of one rollout, in order.

    Prompts are dealt to ranks one by one; a prompt's group stays on its rank while it is generated and scored. Then
    each sequence moves to the rank that trains it: before the forward passes, or, without any, in the update, which
    knows the samples that it trains. Statistics of the whole batch are computed from vectors [B], so that they,
    mini-batches and balance do not depend on the ranks.

    Args:
        greedy: the estimator needs a greedy response per prompt.
        overlapped: forward passes that run while the engine generates.
        environment: answers responses, which then resume with another turn.
        media: source of the media of prompts.
    """
    overlaps = True

    def __init__(self, config: Config, strategy: StrategyBase, engine: RolloutEngine, rewards: RewardManager,
                 tokenizer: PreTrainedTokenizerBase, *, logprobs: LogprobPass, calculator: AdvantageCalculator,
                 timer: Timer, greedy: GreedyBaseline | None = None, overlapped: OverlappedPasses | None = None,
                 environment: AnyEnvironment | None = None, media: MediaSource | None = None) -> None:
        self.media = media
        self.config, self.strategy, self.engine, self.rewards = config, strategy, engine, rewards
        self.tokenizer, self.logprobs, self.calculator, self.timer = tokenizer, logprobs, calculator, timer
        self.greedy, self.overlapped, self.environment = greedy, overlapped, environment
        self.reward_listener = RewardListener(rewards)
        self.listeners: list[Listener] = [self.reward_listener, *([overlapped] if overlapped is not None else [])]
        rollout = config.rollout
        self.per_step = config.reward.step_reward == "per_step"
        self.turn_rewards = isinstance(environment, Player) and calculator.estimator.takes_turns
        self.sampling = sampling_params(rollout, tokenizer)
        self.limits = MicroBatchLimits(config.train.micro_train_batch_size, config.train.max_tokens_per_micro_batch)

    def limit_responses(self, max_len: int) -> None:
        """Limit responses to ``max_len`` tokens from now on."""
        self.sampling = replace(self.sampling, max_new_tokens=max_len)
        self.calculator.max_len = max_len

    def make(self, prompts: list[Prompt], step: int, kl_coef: float = 0.0) -> Rollout:
        """Make one rollout over the global batch ``prompts`` (the same list on every rank)."""
        episodes, wait = self.generate(list(enumerate(prompts)), step)
        return self.complete(episodes, step, kl_coef, wait)

    def open(self, number: int, prompt: Prompt, step: int | str) -> list[Episode]:
        """Return a group of empty episodes, with the seeds of :func:`group_seeds`."""
        return Episode.group(prompt, number, group_seeds(self.config, step, number))

    def generate(self, numbered: list[tuple[int, Prompt]], step: int | str) -> tuple[list[Episode], Wait]:
        """Generate responses to this rank's share of numbered prompts; a collective.

        Args:
            step: part of the seeds, as in :func:`group_seeds`.

        Returns:
            The episodes of this rank, and a function that waits for their scores.
        """
        mine = [self.open(*each, step) for each in self.deal(numbered)]
        return self.advance([*chain.from_iterable(mine)], len(mine), set())

    def prefetch(self, prompts: Sequence[Prompt]) -> None:
        """Process the media of this rank's share of the next prompts in the background. Media with cached features are
        skipped, unless the engine computes its own features. For an engine that reads media, they are decoded too."""
        if self.media is None:
            return
        caps, keys = self.config.rollout.caps, [key for prompt in self.deal(prompts) for key in prompt.media]
        if caps.reads_media:
            self.media.decode_ahead(keys)
        self.media.prefetch(key for key in keys if caps.own_weights or not self.logprobs.has_features(key))

    def deal(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this rank's share of ``items``, dealt one by one."""
        return self.strategy.mesh.engines.of(items)

    def exchange(self, outgoing: list[list[Episode]]) -> list[Episode]:
        """Send ``outgoing[r]`` to rank r, which goes on with these episodes; return those for this rank. A collective.
        """
        for rank, episodes in enumerate(outgoing):
            if rank != self.strategy.rank and isinstance(self.environment, Player):
                self.environment.leave(episodes)
        received = [*chain.from_iterable(self.strategy.exchange(outgoing))]
        self.keep_shown(received)
        return received

    def advance(self, mine: list[Episode], quota: int, due: set[int]) -> tuple[list[Episode], Wait]:
        """Generate until ``quota`` of this rank's groups are finished, and all with a number in ``due``; a collective.

        Args:
            mine: episodes of this rank, group by group.

        Returns:
            The episodes whose scoring began in this call (the rest of every group finished now, and perhaps episodes of
            other groups), and a function that waits for their scores.
        """
        numbers = dict.fromkeys(episode.group_id for episode in mine)
        with ExitStack() as stack:
            for listener in self.listeners:
                stack.enter_context(listener.during([*numbers]))
            with self.timer("rollout"):
                samples = GenerationRun(self, mine, Quota(quota, due & numbers.keys())).run()
        with self.timer("rollout"):  # it ends when the slowest rank is done
            self.strategy.barrier()
        return samples, self._scored(samples, self._answer_greedily(samples))

    def reports_each(self, prompts: Sequence[Prompt]) -> bool:
        """Return True if single responses are reported before their group is finished.

        With ``--oversample`` a score is carried over with its group, so it must be complete without it.
        """
        if not (self.overlaps and any(listener.wants_each(prompts) for listener in self.listeners)):
            return False
        if self.config.rollout.oversample <= 1:
            return True
        return not (self.greedy or self.rewards.compares(prompts))

    def _answer_greedily(self, samples: list[Episode]) -> Wait | None:
        """Start the greedy baseline of each group, if needed; the function returned waits for its scores."""
        if self.greedy is None:
            return None
        with self.timer("greedy"):
            baseline = self.greedy.start(samples, self.sampling)
            self.strategy.barrier()
        return baseline

    def _scored(self, samples: list[Episode], baseline: Wait | None) -> Wait:

        def wait() -> None:
            with self.timer("reward"):
                if baseline is not None:
                    baseline()
                take_scores(samples, self.reward_listener.scores(), self.tokenizer, self.turn_rewards)

        return wait

    def _packed(self, episodes: list[Episode]) -> Batch:
        """Pack episodes, with what was computed of them while the engine generated."""
        exp = Batch.of(episodes)
        if self.overlapped is not None:
            self.overlapped.fill(exp)
        return exp

    def complete(self, episodes: list[Episode], step: int, kl_coef: float = 0.0, wait: Wait | None = None) -> Rollout:
        """Put the engine to sleep, then fill log-probs, values, rewards and advantages; a collective.

        Args:
            episodes: those of this rank, with the positions of their groups in the batch as ``group_id``.
            wait: waits for their scores; None: they have come.
        """
        self.engine.sleep()
        with self.timer("gather"):
            shards = Shards(self.strategy, self._packed(episodes), self.media.show if self.media is not None else None)
            numbers, plan = shards.numbers, self.plan(shards, step)
            if self.logprobs.wanted(shards.size):  # else the update fetches what it trains
                shards.move(plan.owned())
        self.logprobs.fill(shards, plan, self.timer)
        if wait is not None:
            wait()
        batch, owners = shards.batch(), BatchRanks(self.strategy, numbers, shards.size)
        metrics = response_metrics(shards, self.timer.seconds("rollout"))
        if isinstance(self.environment, Player):
            metrics |= play_metrics(episodes, self.strategy)
        metrics |= fill_rewards(batch, episodes, self.calculator.estimator, owners)
        with self.timer("advantage"):
            if self.per_step or self.turn_rewards:
                batch.step_rewards = step_rewards(shards.exp, numbers.tolist(), episodes, self.strategy)
            metrics |= self.calculator(batch, kl_coef)
            shards.update(batch)
            metrics |= number_metrics(shards)
            metrics["rollout/kept_samples"] = (shards.kept > 0).sum().item()
        return Rollout(shards, plan, episodes, metrics)

    def keep_shown(self, episodes: Iterable[Episode]) -> None:
        """Make the pictures of environments in episodes from a checkpoint, or from another rank, known."""
        for play in (episode.play for episode in episodes):
            if play is not None and self.media is not None:
                play.shown = [*map(self.media.show, play.shown)]

    def plan(self, shards: Shards, step: int) -> BatchPlan:
        """Return the plan that cuts the rollout of a step into passes."""
        train = self.config.train
        data = self.strategy.mesh.data
        return BatchPlan(shards.lens, train.train_batch_size, self.limits, data.index, data.size,
                         f"{train.seed}/{step}", shared=shards.shared_work(self.config.shares_prompts),
                         attention=cast(PackedModel, self.logprobs.actor.model).attention)


class NaiveExperienceMaker(FastExperienceMaker):
    """Variant without overlap: responses are reported when all are generated. The results are the same."""
    overlaps = False
