"""Models of an RL run: chosen by the options, prepared by the strategy, connected to the media of the prompts."""
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import nn
from transformers import PreTrainedTokenizerBase

import lightrft.algorithms  # noqa: F401  (fills the registries)
from lightrft.algorithms.base import ADVANTAGES
from lightrft.config.schema import Config
from lightrft.models.config_json import check_context, logit_count
from lightrft.models.loader import load_actor, load_critic
from lightrft.models.packed_model import PackedModel
from lightrft.models.rope import fix_length
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.strategy.materialize import Builder
from lightrft.trainer.frozen_model import check_inputs, check_media, check_width, FrozenModel, teacher_builder
from lightrft.trainer.model_media import connect_media, feature_cache
from lightrft.trainer.optimizer_step import optim_spec
from lightrft.types import MediaSource
from lightrft.utils.errors import UserError


@dataclass
class Models:
    """Models of a run, or functions that build them, before the strategy prepares them one after the other.

    ``reference`` is None without a KL coefficient, and with LoRA (the actor without its adapters is the reference). The
    trainer chooses the teacher itself, because it knows the tokenizer that both must have.
    """
    actor: nn.Module | Builder
    critic: nn.Module | Builder | None = None
    reference: nn.Module | Builder | None = None


def build_models(config: Config, strategy: StrategyBase, own: Models | None = None) -> Models:
    """Choose the models that the options need: the actor, the critic for GAE, the reference for a KL coefficient.

    They are built when the trainer prepares them, so that a rank never holds more than one unsharded model. Models that
    the program has made, ``own``, are taken in place of theirs.

    Raises:
        ValueError: lengths beyond the policy's context.
    """
    rollout = config.rollout
    check_context(config.model.pretrain, prompt_max_len=rollout.prompt_max_len,
                  generate_max_len=rollout.generate_max_len)
    needed = needed_models(config)
    return needed if own is None else Models(own.actor, own.critic or needed.critic, own.reference or needed.reference)


def needed_models(config: Config) -> Models:
    """Return what builds each of the models, without a check."""
    cfg = config.model
    needs_critic = ADVANTAGES.get(config.algorithm.advantage_estimator).needs_critic
    needs_reference = config.algorithm.init_kl_coef > 0 and not cfg.lora_rank
    actor, critic = partial(load_actor, cfg, deferred=True), partial(load_critic, cfg, deferred=True)
    reference = partial(load_actor, cfg, path=cfg.ref_pretrain or cfg.pretrain, train=False, deferred=True)
    return Models(actor, critic if needs_critic else None, reference if needs_reference else None)


@dataclass
class PreparedModels:
    """Models of a run, prepared by the strategy and connected to the media of the prompts."""
    actor: Prepared
    critic: Prepared | None
    reference: Prepared | None
    teacher: FrozenModel | None

    @property
    def resident(self) -> list[Prepared]:
        """Models that are on the device outside generation: all but an offloaded teacher."""
        teacher = self.teacher and not self.teacher.offloads and self.teacher.prepared
        return [each for each in (self.actor, self.critic, self.reference, teacher) if each]

    @property
    def trained(self) -> dict[str, Prepared]:
        """Models with an optimizer, by the names of their checkpoints."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})


def prepare_models(config: Config, strategy: StrategyBase, models: Models, tokenizer: PreTrainedTokenizerBase,
                   media: MediaSource | None, total: int) -> PreparedModels:
    """Prepare the models of a run of ``total`` steps, one after the other."""
    policy_path, cfg = str(config.model.pretrain), config.model
    if models.reference is not None and cfg.ref_pretrain is not None:
        check_inputs("ref_pretrain", cfg.ref_pretrain, policy_path, tokenizer, media)
    if models.critic is not None and cfg.critic_pretrain is not None:
        check_width("critic_pretrain", cfg.critic_pretrain, policy_path, tokenizer)
        check_media("critic_pretrain", cfg.critic_pretrain, policy_path, tokenizer, media)
    train, shard_size, rate = config.train, config.strategy.fsdp_shard_size, config.optimizer_steps
    policy = optim_spec(train, train.actor_learning_rate, max(total - train.freezing_actor_steps, 1) * rate)
    actor, critic, reference = strategy.prepare(models.actor, policy, shard_size), None, None
    if models.critic is not None:
        value = optim_spec(train, train.critic_learning_rate, total * rate)
        critic = strategy.prepare(models.critic, value, shard_size)
    if models.reference is not None:
        reference = strategy.prepare(models.reference, shard_size=config.model.initial_model_shard_size)
    prepared = PreparedModels(actor, critic, reference, _teacher(config, strategy, tokenizer, media))
    _connect(config, strategy, prepared, media)
    return prepared


def _connect(config: Config, strategy: StrategyBase, models: PreparedModels, media: MediaSource | None) -> None:
    """Give policy, critic and reference their media; features are cached for models whose towers are not trained.

    A reference of the policy's own weights has the policy's features.
    """
    cache = feature_cache(config.data)
    connect_media(models.actor.model, media, strategy, cache)
    if models.critic is not None:  # its towers are trained
        connect_media(models.critic.model, media, strategy)
    if models.reference is not None:
        same = config.model.ref_pretrain in (None, config.model.pretrain)
        connect_media(models.reference.model, media, strategy, cache if same else feature_cache(config.data))
    for each in (models.actor, models.critic, models.reference, models.teacher and models.teacher.prepared):
        if each:
            model = cast(PackedModel, each.model)
            model.share_prompts = config.shares_prompts
            fix_length(model.hf_model, config.rollout.longest)  # as the engine does


def _teacher(config: Config, strategy: StrategyBase, tokenizer: PreTrainedTokenizerBase,
             media: MediaSource | None) -> FrozenModel | None:
    """Load the teacher that ``--teacher_model`` asks for, sharded as the policy is.

    Raises:
        UserError: its vocabulary differs, or it has no logits for tokens that the policy may sample.
    """
    path = config.model.teacher_model
    if path is None:
        return None
    build = teacher_builder(config.model, path, tokenizer, media)
    width, own = logit_count(path), logit_count(str(config.model.pretrain))
    if width < own:
        raise UserError(
            f"--teacher_model {path}: it has {width} logits, but the policy can sample {own} different tokens. Use a "
            "teacher whose vocabulary is padded at least as far")
    teacher = FrozenModel(build, strategy, config.strategy.fsdp_shard_size, config.model.teacher_offload)
    teacher.connect(media, config.data)
    return teacher
