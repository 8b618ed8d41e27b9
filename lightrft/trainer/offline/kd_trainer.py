"""Distillation: a student learns the next-token distributions of a teacher, and the tokens of the data."""
from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lightrft.config.sft_schema import KDConfig
from lightrft.datasets.sft_dataset import SFTExample
from lightrft.models.config_json import logit_count
from lightrft.ops.divergence import coarse, divergence
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.materialize import Builder
from lightrft.trainer.frozen_model import teacher_builder
from lightrft.trainer.offline.offline_trainer import Loss
from lightrft.trainer.offline.sft_trainer import SFTTrainer
from lightrft.trainer.offline.teacher import CachedTeacher, LiveTeacher, Teacher
from lightrft.trainer.offline.teacher_cache import TeacherCache
from lightrft.types import Experience, MediaSource
from lightrft.utils.errors import UserError
from lightrft.utils.timer import Timer


class KDTrainer(SFTTrainer):
    """Trains on ``(1 - kd_coef) * NLL + kd_coef * divergence`` per assistant token; rows are those of SFT."""
    config: KDConfig

    def __init__(self, config: KDConfig, strategy: StrategyBase, model: nn.Module | Builder,
                 tokenizer: PreTrainedTokenizerBase, rows: Sequence[SFTExample], eval_rows: Sequence[SFTExample] = (),
                 timer: Timer | None = None, media: MediaSource | None = None) -> None:
        cfg, path = config.teacher, str(config.teacher.teacher_model)
        build = teacher_builder(config.model, path, tokenizer, media)
        super().__init__(config, strategy, model, tokenizer, rows, eval_rows, timer, media)
        # heads are padded to different widths in one family
        self.vocab = min(map(logit_count, (str(config.model.pretrain), path)))
        if cfg.kd_top_k > self.vocab:
            raise UserError(f"--kd_top_k {cfg.kd_top_k}: the models have {self.vocab} logits; give at most that, or 0 "
                            "for all")
        live = partial(LiveTeacher, config, strategy, build, self.vocab, media)
        self.teacher: Teacher
        if cfg.teacher_cache_dir is None or strategy.plans:  # a plan makes no folder
            self.teacher = live()
        else:
            cache = TeacherCache(cfg.teacher_cache_dir, path, cfg.kd_top_k, self.vocab, bool(config.model.bf16),
                                 strategy, media.settings if media else "")
            self.teacher = CachedTeacher(cache, live, strategy)

    def before_loop(self, fresh: bool) -> None:
        """Fill the cache of the teacher."""
        if isinstance(self.teacher, CachedTeacher):
            with self.timer("ref"):
                self.teacher.fill((batch.exp for batch in self.batches()), self.plan_of)

    def loss_of(self, exp: Experience, total: float) -> Loss:
        """Return the mixture of NLL and divergence, and both per token."""
        cfg, targets = self.config.teacher, exp.token_ids[exp.actions]
        with self.timer("ref"):
            found = self.teacher.taught(exp)

        def read(logprobs: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            own = coarse(logprobs, found[1][part]) if cfg.kd_top_k else logprobs
            gaps = divergence(own, found[0][part], cfg.divergence, cfg.js_mix)
            return gaps, -logprobs.gather(-1, targets[part, None])[:, 0]

        gaps, nll = self.actor.model(exp, read=read, vocab=self.vocab)
        weights = 1 if exp.token_weights is None else exp.token_weights[exp.actions]
        loss = (weights * (cfg.kd_coef * gaps + (1 - cfg.kd_coef) * nll)).sum() / total
        return loss, {"divergence": gaps, "nll": nll}
