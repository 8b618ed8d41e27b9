"""Held-out evaluation: pass@k and avg@k per data source. It reads the weights and changes no training state."""
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import Config
from lightrft.rewards.manager import RewardManager
from lightrft.rollout.engine import Request, RolloutEngine, SamplingParams
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.environment import Environment, next_turn
from lightrft.trainer.samples import Response, reward_input, sample_seed, stop_token_ids, to_samples
from lightrft.types import Prompt, Sample

ACCURACY_PARTS = ("accuracy", "math", "exact")  # reward parts that judge correctness, best first


def is_correct(reward: float | None, parts: dict[str, float | None]) -> bool:
    """Decide whether an answer is correct: by its accuracy part if it has one, else by a total of at least 1."""
    verdict = next((parts[name] for name in ACCURACY_PARTS if name in parts), reward)
    return verdict is not None and verdict >= 1.0 - 1e-6


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of k samples drawn without replacement from n is correct: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021 (arXiv:2107.03374), eq. 1.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


class Evaluator:
    """Evaluates the engine's current weights on the held-out prompts, spread over the ranks.

    Its seeds depend on the prompt alone, so every evaluation draws the same noise and curves are comparable.
    """

    def __init__(self, config: Config, strategy: StrategyBase, engine: RolloutEngine, rewards: RewardManager,
                 tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt],
                 environment: Environment | None = None) -> None:
        self.config, self.strategy, self.engine, self.rewards = config, strategy, engine, rewards
        self.tokenizer, self.prompts, self.environment = tokenizer, prompts, environment
        cfg, rollout = config.eval, config.rollout
        self.sampling = SamplingParams(rollout.generate_max_len, cfg.eval_temperature, cfg.eval_top_p,
                                       stop_token_ids=stop_token_ids(rollout.stop, tokenizer))

    def run(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return ``eval/<source>/...``, ``eval/all/...`` of all ranks, and a row per response of the first prompts."""
        mine = list(enumerate(self.prompts))[self.strategy.rank::self.strategy.world_size]
        samples = self._generate(mine)
        scores = self.rewards.collect(
            self.rewards.submit([reward_input(sample.prompt, sample.text) for sample in samples]))
        local = [{
            "group_id": s.group_id, "index": s.index, "source": s.prompt.data_source or "default", "reward":
            score.total, "error": score.error, "parts": score.parts, "length": s.response_len, **self._texts(s)
        } for s, score in zip(samples, scores)]
        rows = [row for part in self.strategy.all_gather_object(local) for row in part]
        rows.sort(key=lambda row: (row["group_id"], row["index"]))
        return self._metrics(rows), [row for row in rows if "prompt" in row]

    def _texts(self, sample: Sample) -> dict[str, Any]:
        if sample.group_id >= self.config.log.print_samples or sample.index:
            return {}
        return {"prompt": sample.prompt.text, "response": sample.text, "reference": sample.prompt.reference}

    def _generate(self, mine: list[tuple[int, Prompt]]) -> list[Sample]:
        n = self.config.eval.eval_n_samples
        requests = [Request(p.token_ids, [sample_seed("eval", p.uid, j) for j in range(n)], p.media) for _, p in mine]
        turns = next_turn(self.environment, self.tokenizer, lambda i, k: (mine[i][1], []))
        completions = self.engine.generate(requests, self.sampling, next_turn=turns)
        version = self.engine.weight_version
        ended = ((*prompt, j, Response.of(done, version)) for prompt, responses in zip(mine, completions)
                 for j, done in enumerate(responses))
        return to_samples(self.tokenizer, ended, self.sampling.stop_token_ids)

    def _metrics(self, rows: list[dict[str, Any]]) -> dict[str, float]:
        sources = sorted({row["source"] for row in rows})
        metrics: dict[str, float] = {}
        for name in ["all", *sources]:
            metrics |= self._source_metrics(name, [row for row in rows if name in ("all", row["source"])])
        return metrics

    def _source_metrics(self, name: str, rows: list[dict[str, Any]]) -> dict[str, float]:
        """Return the metrics of a source. Unscored responses enter no mean and are counted by cause."""
        cfg, groups = self.config.eval, defaultdict(list)
        scored = [row for row in rows if row["reward"] is not None]
        for row in scored:
            groups[row["group_id"]].append(is_correct(row["reward"], row["parts"]))
        values = {
            f"pass@{k}": [pass_at_k(len(g), sum(g), k) for g in groups.values() if len(g) >= k] for k in cfg.eval_pass_k
        }
        values[f"avg@{cfg.eval_n_samples}"] = [row["reward"] for row in scored]
        values["len"] = [row["length"] for row in rows]
        for part in sorted({part for row in rows for part in row["parts"]}):
            values[part] = [row["parts"][part] for row in rows if row["parts"].get(part) is not None]
        metrics = {f"eval/{name}/{metric}": sum(of) / len(of) for metric, of in values.items() if of}
        causes = Counter(row["error"] or "unknown" for row in rows if row["reward"] is None)
        return metrics | {f"eval/{name}/unscored": len(rows) - len(scored)} | {
            f"eval/{name}/unscored/{cause}": count for cause, count in sorted(causes.items())
        }  # yapf: disable
