"""Training of scalar reward models on pairs (Bradley-Terry)."""
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightrft.config.options import show
from lightrft.config.rm_schema import RMConfig
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.preferences import Pair, PairDataset
from lightrft.datasets.rows import place_of
from lightrft.models.loader import load_reward_model
from lightrft.models.reward_model import RewardModel
from lightrft.ops.preference import ordered_rightly, pair_loss
from lightrft.trainer.offline.offline_trainer import HELD_OUT, Loss, LossBatch
from lightrft.trainer.offline.preference_trainer import pairs_of, PairTrainer
from lightrft.types import Experience
from lightrft.utils.errors import UserError


class RMTrainer(PairTrainer):
    """Trains the scores of a :class:`RewardModel`; the exported config has mean and std of the rewards: held-out ones,
    or those of training rows if nothing is evaluated."""
    config: RMConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held_out: list[Tensor] = []  # rewards of an evaluation, of this rank
        self._evaluates = bool(self.eval_rows and self.eval_steps)
        self.describe(self.scorer, self.tokenizer, {})

    @property
    def scorer(self) -> RewardModel:
        """The model."""
        return cast(RewardModel, self.actor.model)

    @classmethod
    def read(cls, config: Any, tokenizer: PreTrainedTokenizerBase, split: str, media: MediaStore | None) -> PairDataset:
        """Extend :meth:`PairTrainer.read` by :func:`check_heads` and :func:`check_margins`."""
        check_names(config.model.heads_types)
        rows = super().read(config, tokenizer, split, media)
        check_heads(rows, config.model.heads_types, split)
        check_margins(rows, split)
        return rows

    @classmethod
    def load(cls, config: RMConfig) -> nn.Module:
        """Load the model with its head."""
        return load_reward_model(config.model, deferred=True)

    @classmethod
    def describe(cls, model: nn.Module, tokenizer: PreTrainedTokenizerBase, state: Mapping[str, Any]) -> None:
        """Extend :meth:`OfflineTrainer.describe`: the padding, and mean and std of rewards if ``state`` has them."""
        scorer = cast(RewardModel, model)
        text: Any = scorer.hf_model.config.get_text_config()
        shared = tokenizer.pad_token_id == tokenizer.eos_token_id
        # with a shared one Hugging Face would take the last token of a sequence for padding
        text.pad_token_id = None if shared else tokenizer.pad_token_id
        scorer.head.mean, scorer.head.std = state.get("moments", (scorer.head.mean, scorer.head.std))
        scorer.head.write(scorer.hf_model.config)

    def pack(self, rows: Sequence[Pair]) -> LossBatch:
        """Extend :meth:`PairTrainer.pack`: ``margins`` [B], and ``labels`` [B, K] of all heads; NaN where a row has
        none."""
        batch, names = super().pack(rows), self.config.model.heads_types[1:]
        default = self.config.train.margin
        margins = torch.tensor([default if pair.margin is None else pair.margin for pair in rows])
        others = torch.tensor([[pair.heads.get(name, torch.nan) for name in names] for pair in rows])
        labels = torch.cat([batch.exp.labels[:, None], others.view(len(rows), -1).repeat_interleave(2, 0)], 1)
        return replace(batch, exp=replace(batch.exp, labels=labels, margins=margins.repeat_interleave(2)))

    def loss_of(self, exp: Experience, total: float) -> Loss:
        """Return the mean over heads of :func:`pair_loss`; margins of rows are those of the first head."""
        chosen, rejected = pairs_of(self.scorer(exp))
        labels, margins = pairs_of(exp.labels)[0], pairs_of(exp.margins)[0]
        by_head = torch.full_like(labels, self.config.train.margin)
        by_head[:, 0] = margins
        losses = pair_loss(chosen, rejected, labels, by_head, self.config.train.loss)
        if not torch.is_grad_enabled():
            self._held_out += [chosen[:, 0].double().cpu(), rejected[:, 0].double().cpu()]
        heads = (~labels.isnan()).sum(1)
        return (losses.sum(1) / heads).sum() / total, self._metrics_of(chosen, rejected, labels)

    def _metrics_of(self, chosen: Tensor, rejected: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return rewards of the first head, and for each head the pairs that it orders as their label says."""
        gap, found = (chosen - rejected).detach(), {}
        for i, name in enumerate(self.config.model.heads_types):
            labelled = labels[:, i] != 0.5
            labelled &= ~labels[:, i].isnan()
            right = ordered_rightly(torch.where(labels[:, i] > 0.5, gap[:, i], -gap[:, i]))
            found["accuracy" if i == 0 else f"accuracy_{name}"] = right[labelled]
        return found | {"rewards/chosen": chosen[:, 0], "rewards/rejected": rejected[:, 0], "rewards/margin": gap[:, 0]}

    def measure(self, rows: Sequence[Pair]) -> dict[str, float]:
        """Extend :meth:`OfflineTrainer.measure` by mean and std of the rewards, which the export keeps."""
        self._held_out = []
        metrics = super().measure(rows)
        rewards = torch.cat(self._held_out)
        sums = torch.stack([torch.ones_like(rewards).sum(), rewards.sum()])
        count, total = self.strategy.sum_data_ranks(sums).tolist()
        square = self.strategy.sum_data_ranks(((rewards - total / count)**2).sum()).item()
        moments = (total / count, (square / count)**0.5)
        self.describe(self.scorer, self.tokenizer, {"moments": moments})
        return metrics | {"eval/reward_mean": self.scorer.head.mean, "eval/reward_std": self.scorer.head.std}

    def save(self) -> None:
        """Extend :meth:`BaseTrainer.save`: without an evaluation, mean and std are those of training rows of the whole
        data, as many as are evaluated at once."""
        if not self._evaluates and self.step != self._saved:
            rows = self.loader.dataset
            with self.timer("eval"):
                self.measure([rows[i] for i in range(0, len(rows), -(-len(rows) // HELD_OUT))])
        super().save()

    def extra_state(self) -> dict[str, Any]:
        """Extend :meth:`OfflineTrainer.extra_state` by the moments of the rewards."""
        return super().extra_state() | {"moments": (self.scorer.head.mean, self.scorer.head.std)}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`extra_state`."""
        super().load_extra_state(state)
        self.describe(self.scorer, self.tokenizer, state)


def check_names(names: Sequence[str]) -> None:
    """Check the names of the heads.

    Raises:
        UserError: there are none, or two are the same.
    """
    if not names:
        raise UserError("--heads_types is empty: a reward model has at least one score; name it, e.g. preference")
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise UserError(f"--heads_types {show(list(names))}: {twice[0]!r} is there twice; give each score its own name")


def check_heads(rows: Sequence[Pair], names: Sequence[str], split: str) -> None:
    """Check that rows of the ``split`` "train" label every head after the first one, and no rows another one; with one
    head the labels are not read.

    Raises:
        UserError: a row labels a head that is not there, or no training row labels one that is.
    """
    others, labelled = names[1:], {name: pair.uid for pair in reversed(rows) for name in pair.heads}
    known = ", ".join(map(repr, others))
    for name, uid in labelled.items():
        if others and name not in others:
            raise UserError(f"{place_of(uid, split)}: the column 'heads' has {name!r}, and the "
                            f"scores that learn from it are {known} (--heads_types without its first one). Correct or "
                            "remove it in the rows, or add it to --heads_types")
    for name in others if split == "train" else ():
        if name not in labelled:
            raise UserError(
                f"--heads_types {show(list(names))}: no row of the training data labels {name!r} (labelled: "
                f"{', '.join(map(repr, labelled)) or 'nothing'}). Give rows a column 'heads' with "
                f"{{{name!r}: 'chosen', 'rejected' or 'tie'}}, or drop the score")


def check_margins(rows: Sequence[Pair], split: str) -> None:
    """Refuse a negative margin of a row of the ``split`` "train" or "eval": its answers are in the wrong order."""
    wrong = next((pair for pair in rows if (pair.margin or 0) < 0), None)
    if wrong is not None:
        raise UserError(
            f"{place_of(wrong.uid, split)}: the margin {wrong.margin:g} is negative, so the rejected answer "
            "is the better one. Exchange both answers, or remove the margin")
