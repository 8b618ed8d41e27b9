"""Held-out evaluation: pass@k and reward@k per data source, with intervals; it changes no training state."""
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import Config
from lightrft.environments.play import Player
from lightrft.rewards.correctness import check_accuracy_part, Correctness
from lightrft.rewards.manager import RewardManager
from lightrft.rollout.engine import RolloutEngine, SamplingParams
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.environment import AnyEnvironment
from lightrft.trainer.play_metrics import play_metrics
from lightrft.trainer.samples import judged, respond, sample_seed, stop_token_ids
from lightrft.types import Episode, Prompt
from lightrft.utils.logging import warn_of_all
from lightrft.utils.score import Score

GROUPS, SAMPLES = 4, 8  # held-out prompts, and answers to each, that the report shows
Z = 1.959964  # of an interval of 95 %


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of k samples drawn without replacement from n is correct: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021 (arXiv:2107.03374), eq. 1.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def wilson_interval(mean: float, prompts: int) -> tuple[float, float]:
    """Return the 95 % score interval of a mean over prompts of values in [0, 1] (Wilson 1927, eq. for p).

    It holds for 0/1 values, and is conservative for averages of several samples per prompt, whose variance is at
    most p(1 - p). Unlike a bootstrap interval it is not empty when all prompts agree, and it is valid for 30 prompts.
    """
    centre, weight = mean + Z * Z / (2 * prompts), 1 + Z * Z / prompts
    half = Z * math.sqrt(mean * (1 - mean) / prompts + Z * Z / (4 * prompts * prompts))
    return max(0.0, (centre - half) / weight), min(1.0, (centre + half) / weight)


@dataclass(frozen=True)
class Answer:
    """Scored response to a held-out prompt, as all ranks need it."""
    group_id: int
    index: int
    source: str  # data source of the prompt
    length: int  # tokens of the response
    score: Score
    sample: Episode | None = None  # the response itself, where it is shown


class Evaluator:
    """Evaluates the engine's current weights on the held-out prompts, spread over the ranks.

    Its seeds depend only on the prompt, so every evaluation draws the same noise and curves are comparable.
    """

    def __init__(self, config: Config, strategy: StrategyBase, engine: RolloutEngine, rewards: RewardManager,
                 tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt],
                 environment: AnyEnvironment | None = None) -> None:
        self.config, self.strategy, self.engine, self.rewards = config, strategy, engine, rewards
        self.tokenizer, self.prompts, self.environment = tokenizer, prompts, environment
        self.correctness, self.warned = Correctness.of(config.reward, config.eval.accuracy_part), False
        cfg, rollout = config.eval, config.rollout
        self.sampling = SamplingParams(rollout.generate_max_len, cfg.eval_temperature, cfg.eval_top_p,
                                       stop_token_ids=stop_token_ids(rollout.stop, tokenizer))

    def run(self) -> tuple[dict[str, float], list[Answer]]:
        """Return ``eval/<source>/...``, ``eval/all/...`` of all ranks, and the first answers to the first prompts."""
        mine = self.strategy.mesh.engines.of(list(enumerate(self.prompts)))
        samples = self._generate(mine)
        scores = self.rewards.score([judged(sample) for sample in samples])
        for sample, score in zip(samples, scores):
            sample.score = score
        local = [
            Answer(sample.group_id, sample.index, sample.prompt.data_source or "default", sample.drawn_len, score,
                   sample if self._shown(sample) else None) for sample, score in zip(samples, scores)
        ]
        answers = [answer for part in self.strategy.all_gather_object(local) for answer in part]
        answers.sort(key=lambda answer: (answer.group_id, answer.index))
        self._define_right([answer.score for answer in answers if answer.score.total is not None])
        played = play_metrics(samples, self.strategy) if isinstance(self.environment, Player) else {}
        metrics = self._metrics(answers) | {f"eval/all/{name}": value for name, value in played.items()}
        return metrics, [answer for answer in answers if answer.sample is not None]

    def _define_right(self, scores: list[Score]) -> None:
        """Learn which part says what is right; say once, on one rank, where none does."""
        self.correctness.observe(score.parts for score in scores)
        if not self.config.reward.reward_probe:  # which knows the numbers of functions before the run
            check_accuracy_part(self.correctness.accuracy_part, self.correctness.seen,
                                [score.parts for score in scores])
        undefined = [score.parts for score in scores if self.correctness.is_right(score.parts, score.weights) is None]
        if undefined and not self.warned:
            warn_of_all(
                f"held-out accuracy (pass@k) of {len(undefined)} of {len(scores)} responses is not defined, and "
                f"eval/all/reward@{self.config.eval.eval_n_samples} is their mean reward: "
                f"{self.correctness.remedy(undefined)}")
            self.warned = True

    def _shown(self, sample: Episode) -> bool:
        log = self.config.log
        printed = sample.group_id < log.print_samples and not sample.index
        return printed or log.report and sample.group_id < GROUPS and sample.index < SAMPLES

    def _generate(self, mine: Sequence[tuple[int, Prompt]]) -> list[Episode]:
        seeds = [[sample_seed("eval", prompt.uid, j) for j in range(self.config.eval.eval_n_samples)]
                 for _, prompt in mine]
        return respond(self.engine, self.tokenizer, self.environment, mine, seeds, self.sampling, "evaluation")

    def _metrics(self, answers: list[Answer]) -> dict[str, float]:
        sources = sorted({answer.source for answer in answers})
        metrics: dict[str, float] = {}
        for name in ["all", *sources]:
            metrics |= self._source_metrics(name, [answer for answer in answers if name in ("all", answer.source)])
        return metrics

    def _source_metrics(self, name: str, answers: list[Answer]) -> dict[str, float]:
        """Return the metrics of a source. Unscored responses enter no mean and are counted by cause."""
        cfg, scores = self.config.eval, [answer.score for answer in answers]
        scored = [answer for answer in answers if answer.score.total is not None]
        rewards = [answer.score.total or 0.0 for answer in scored]
        values: dict[str, list[float]] = {f"reward@{cfg.eval_n_samples}": rewards}
        values["len"] = [answer.length for answer in answers]
        for part in sorted({part for score in scores for part in score.parts}):
            values[part] = [value for score in scores if (value := score.parts.get(part)) is not None]
        metrics = self._passed(scored) | {metric: sum(of) / len(of) for metric, of in values.items() if of}
        metrics |= {"prompts": len({answer.group_id for answer in answers}), "unscored": len(answers) - len(scored)}
        causes = Counter(f"unscored/{score.error or 'unknown'}" for score in scores if score.total is None)
        causes += Counter(f"faults/{answer.score.fault}" for answer in scored if answer.score.fault)
        metrics |= dict(sorted(causes.items()))
        return {f"eval/{name}/{metric}": value for metric, value in metrics.items()}

    def _passed(self, scored: list[Answer]) -> dict[str, float]:
        """Return ``pass@k`` and its interval, over the prompts with at least k scored samples that can be right."""
        groups = defaultdict(list)
        for answer in scored:
            right = self.correctness.is_right(answer.score.parts, answer.score.weights)
            if right is not None:
                groups[answer.group_id].append(right)
        metrics: dict[str, float] = {}
        for k in self.config.eval.eval_pass_k:
            rates = [pass_at_k(len(group), sum(group), k) for group in groups.values() if len(group) >= k]
            if rates:
                mean = metrics[f"pass@{k}"] = sum(rates) / len(rates)
                metrics[f"pass@{k}/low"], metrics[f"pass@{k}/high"] = wilson_interval(mean, len(rates))
        return metrics
