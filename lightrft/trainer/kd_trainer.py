"""Distillation: a student learns the next-token distributions of a teacher, and the words of the data."""
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightrft.config.kd_schema import KDConfig
from lightrft.datasets.sft_dataset import SFTExample
from lightrft.models.loader import load_actor
from lightrft.models.tokenizer import load_tokenizer
from lightrft.ops.divergence import coarse, divergence, top_tokens
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.materialize import Builder
from lightrft.trainer.base_trainer import connect_media, feature_cache
from lightrft.trainer.frozen_model import FrozenModel
from lightrft.trainer.offline_trainer import Loss
from lightrft.trainer.sft_trainer import SFTTrainer
from lightrft.types import Experience, MediaSource
from lightrft.utils.errors import UserError
from lightrft.utils.timer import Timer


def check_vocabulary(student: PreTrainedTokenizerBase, path: str) -> None:
    """Raise a :class:`UserError` if the teacher at ``path`` numbers its tokens otherwise than the student."""
    own, theirs = student.get_vocab(), load_tokenizer(path).get_vocab()
    differ = sorted(token for token in own.keys() | theirs.keys() if own.get(token) != theirs.get(token))
    if differ:
        raise UserError(f"--teacher_model {path}: {len(differ)} of its tokens are not those of the student (the first: "
                        f"{differ[0]!r}), so their distributions cannot be compared. Take a teacher of the same family")


class KDTrainer(SFTTrainer):
    """Trains on ``(1 - kd_coef) * NLL + kd_coef * divergence`` per assistant token; rows are those of SFT."""
    config: KDConfig

    def __init__(self, config: KDConfig, strategy: StrategyBase, model: nn.Module | Builder,
                 tokenizer: PreTrainedTokenizerBase, rows: Sequence[SFTExample], eval_rows: Sequence[SFTExample] = (),
                 timer: Timer | None = None, media: MediaSource | None = None) -> None:
        path = str(config.teacher.teacher_model)
        check_vocabulary(tokenizer, path)
        super().__init__(config, strategy, model, tokenizer, rows, eval_rows, timer, media)
        build = partial(load_actor, config.model, path=path, train=False, deferred=True)
        self.teacher = FrozenModel(build, strategy, config.strategy.fsdp_shard_size, config.teacher.teacher_offload)
        connect_media(self.teacher.prepared.model, media, strategy, feature_cache(config.data))
        # heads are padded to different widths in one family
        self.vocab = min(_width(each.model) for each in (self.actor, self.teacher.prepared))

    def loss_of(self, exp: Experience, total: float) -> Loss:
        """Return the mixture of NLL and divergence, and both per token."""
        cfg, targets = self.config.teacher, exp.token_ids[exp.actions]
        found = self._taught(exp)

        def read(logprobs: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            own = coarse(logprobs, found[1][part]) if cfg.kd_top_k else logprobs
            gaps = divergence(own, found[0][part], cfg.divergence, cfg.js_mix)
            return gaps, -logprobs.gather(-1, targets[part, None])[:, 0]

        gaps, nll = self.actor.model(exp, read=read, vocab=self.vocab)
        loss = (cfg.kd_coef * gaps + (1 - cfg.kd_coef) * nll).sum() / total
        return loss, {"divergence": gaps, "nll": nll}

    @torch.no_grad()
    def _taught(self, exp: Experience) -> tuple[Tensor, ...]:
        """Return the teacher's log-probs [N, V]; with ``kd_top_k`` those of its likeliest tokens, and their ids."""
        k = self.config.teacher.kd_top_k

        def read(logprobs: Tensor, part: slice) -> tuple[Tensor, ...]:
            return top_tokens(logprobs, k)[::-1] if k else (logprobs, )

        with self.timer("ref"), self.teacher.here() as model:
            return model(exp, read=read, vocab=self.vocab)


def _width(model: Any) -> int:
    """Return the number of logits of a model."""
    return int(model.hf_model.config.get_text_config().vocab_size)
