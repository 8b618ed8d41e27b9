"""Training of generative judges: supervised fine-tuning on judgements, evaluated by the judge's generated answers."""
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lightrft.config.rm_schema import GRMConfig
from lightrft.config.schema import RolloutConfig
from lightrft.datasets.judgements import ANSWERS, judge_format, JudgedExample, JudgementDataset, TIE, verdict
from lightrft.datasets.media_store import MediaStore
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.config_json import context_of
from lightrft.models.packed_model import PackedModel
from lightrft.models.reward_model import JUDGE
from lightrft.models.rope import grouped
from lightrft.rollout.engine import RolloutEngine, SamplingParams
from lightrft.rollout.hf.engine import engine_on
from lightrft.rollout.weight_sync.sync import sync_weights
from lightrft.trainer.samples import respond
from lightrft.trainer.offline.sft_trainer import SFTTrainer
from lightrft.types import Episode, Prompt

ORDERS = {0: "first", 1: "second"}


class GRMTrainer(SFTTrainer):
    """Extends :class:`SFTTrainer` by ``eval/accuracy``: the share of held-out rows on which the answer that the judge
    generates (greedily) is the right one, also reported by the position of the better candidate."""
    config: GRMConfig

    @classmethod
    def read(cls, config: Any, tokenizer: PreTrainedTokenizerBase, split: str,
             media: MediaStore | None) -> JudgementDataset:
        """Read judgements."""
        return JudgementDataset(config.data, tokenizer, split, media, config.train.seed)

    @classmethod
    def load(cls, config: Any) -> nn.Module:
        """Extend :meth:`OfflineTrainer.load`: exports have the format of the requests, by which rewards know them."""
        model = super().load(config)
        setattr(cast(PackedModel, model).config, JUDGE, vars(judge_format(config.data)))
        return model

    def evaluate(self) -> dict[str, float]:
        """Extend :meth:`OfflineTrainer.evaluate` by the accuracy; a collective."""
        metrics = super().evaluate()
        if not metrics:
            return {}
        rows = cast(Sequence[JudgedExample], self.eval_rows)
        said = self.judge(rows)
        metrics["eval/answered"] = sum(one in ANSWERS for one in said) / len(rows)
        for name, places in {"accuracy": (0, 1, TIE), **{f"accuracy_{ORDERS[i]}": (i, ) for i in ORDERS}}.items():
            verdicts = [_credit(row, one) for row, one in zip(rows, said) if row.right in places]
            metrics |= {f"eval/{name}": sum(verdicts) / len(verdicts)} if verdicts else {}
        return metrics

    @property
    def policy(self) -> ActorLanguage:
        """The model that judges."""
        return cast(ActorLanguage, self.actor.model)

    @torch.no_grad()
    def judge(self, rows: Sequence[JudgedExample]) -> list[str]:
        """Generate a judgement of every row, shared among the ranks, and return their answers; a collective."""
        prompts = [_prompt(row) for row in rows]
        mine = self.strategy.mesh.engines.of([*enumerate(prompts)])
        limits = self._limits(prompts)
        rollout = RolloutConfig(prompt_max_len=self.config.data.max_len, generate_max_len=max(limits))
        engine = engine_on(self.policy, self.strategy.device, rollout, self.tokenizer, bool(self.config.model.bf16),
                           fixed=False)
        try:
            sync_weights(self.strategy, self.actor, engine, 0)
            samples = [
                sample for limit in sorted({*limits})
                for sample in self._judged(engine, [each for each in mine if limits[each[0]] == limit], limit)
            ]
        finally:
            engine.shutdown()
        said = [(sample.group_id, verdict(sample.text)) for sample in samples]
        return [text for _, text in sorted(sum(self.strategy.all_gather_object(said), []))]

    def _judged(self, engine: RolloutEngine, numbered: list[tuple[int, Prompt]], limit: int) -> list[Episode]:
        """Generate judgements of at most ``limit`` tokens, each with the frequencies of its own length."""
        model = self.policy.hf_model
        groups = grouped(model, (len(prompt.token_ids) + limit for _, prompt in numbered))
        return [sample for group in groups for sample in respond(
            engine, self.tokenizer, None, [numbered[i] for i in group], [[0]] * len(group), SamplingParams(limit, 0.0),
            "judging")]  # yapf: disable

    def _limits(self, prompts: Sequence[Prompt]) -> list[int]:
        """Return the limit of each judgement in tokens: the option, or the positions that its prompt leaves.

        Those are rounded down to four binary digits, so that few calls of the engine serve all prompts.
        """
        most, context = self.config.train.generate_max_len, context_of(str(self.config.model.pretrain)) or 1 << 30
        rooms = [max(1, context - len(prompt.token_ids)) for prompt in prompts]
        spare = [max(0, room.bit_length() - 4) for room in rooms]
        return [most if room >= most else room >> digits << digits for room, digits in zip(rooms, spare)]


def _credit(row: JudgedExample, answer: str) -> float:
    """Return 1 for the right answer, and 1/2 for a tie where one candidate is better, as for equal rewards."""
    return 1.0 if answer == ANSWERS[row.right] else 0.5 * (answer == ANSWERS[TIE])


def _prompt(row: JudgedExample) -> Prompt:
    """Return the request of a row, up to the start of its judgement."""
    return Prompt(row.uid, row.token_ids[:row.loss_mask.index(True)], "", media=row.media)
