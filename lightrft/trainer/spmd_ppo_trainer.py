"""The trainer of scripts: wires config, strategy and models into :class:`PPOTrainer`, identically on every rank."""
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pkgutil import resolve_name
from typing import Any, cast

from torch import nn
from transformers import PreTrainedTokenizerBase

import lightrft.algorithms  # noqa: F401  (fills the registries)
from lightrft.algorithms.base import ADVANTAGES
from lightrft.config.schema import Config
from lightrft.config.stages import check_total, steps_of_data
from lightrft.datasets.loader import PromptLoader
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.rows import place_of
from lightrft.datasets.sft_dataset import SFTExample
from lightrft.models.config_json import check_context, logit_count
from lightrft.models.loader import load_actor, load_critic
from lightrft.models.packed_model import PackedModel
from lightrft.models.rope import fix_length
from lightrft.models.vocabulary import check_rows
from lightrft.rewards.correctness import check_accuracy_part
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.placement import ScorerSetup
from lightrft.rewards.validation import check_columns, check_references, check_spread, probe
from lightrft.rollout.engine import RolloutEngine
from lightrft.rollout.engines import get_engine
from lightrft.strategy.base import Prepared, StrategyBase
from lightrft.strategy.materialize import Builder
from lightrft.trainer.advantage_calculator import get_advantage_calculator
from lightrft.trainer.controllers import get_kl_controller
from lightrft.trainer.environment import Environment
from lightrft.trainer.evaluator import Evaluator
from lightrft.trainer.fast_exp_maker import FastExperienceMaker, GreedyBaseline
from lightrft.trainer.frozen_model import check_inputs, check_media, check_width, FrozenModel, teacher_builder
from lightrft.trainer.logprob_pass import LogprobPass, ModelOffloader
from lightrft.trainer.model_media import connect_media, feature_cache
from lightrft.trainer.optimizer_step import optim_spec
from lightrft.trainer.overlapped_passes import OverlappedPasses
from lightrft.trainer.ppo_trainer import PPOTrainer
from lightrft.trainer.ppo_update import PolicyUpdate
from lightrft.trainer.pretraining_loss import PretrainingLoss
from lightrft.trainer.run_log import RolloutLog
from lightrft.trainer.samples import reward_input
from lightrft.types import MediaSource, Prompt
from lightrft.utils.errors import UserError
from lightrft.utils.lightrft_names import answers_names
from lightrft.utils.timer import Timer


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


def _try_rewards(config: Config, rewards: RewardManager, prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
    """Raise if the rewards lack the part of ``--accuracy_part``, cannot fill a batch of dynamic sampling, cannot read
    the references of prompts, or do not separate good from bad answers."""
    check_accuracy_part(config.eval.accuracy_part, rewards.part_names())
    for rows in (prompts, held_out):
        check_columns(rewards, (reward_input(prompt, "") for prompt in rows), every=False)
    if not (config.rollout.dynamic_sampling or config.reward.reward_probe):
        return  # the data may be large: do not read it for nothing
    asked = [reward_input(prompt, "") for prompt in prompts]
    if config.rollout.dynamic_sampling:
        check_spread(rewards, asked, config.algorithm.zero_spread)
    if config.reward.reward_probe:
        scores = probe(rewards, asked)
        check_accuracy_part(config.eval.accuracy_part, rewards.part_names(), [score.parts for score in scores])
        check_references(rewards, [reward_input(prompt, "") for prompt in held_out])


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


def _prepare(config: Config, strategy: StrategyBase, models: Models, tokenizer: PreTrainedTokenizerBase,
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


def _start_engine(config: Config, strategy: StrategyBase, actor: nn.Module, tokenizer: PreTrainedTokenizerBase,
                  offloader: ModelOffloader) -> RolloutEngine:
    """Start the engine under the memory conditions of generation: models that are offloaded then are offloaded now."""
    offloader.offload()
    engine = get_engine(config.rollout, actor, strategy, tokenizer, bool(config.model.bf16))
    if offloader.offloaded:
        engine.sleep()
        offloader.reload()
    return engine


def _greedy(config: Config, engine: RolloutEngine, rewards: RewardManager, tokenizer: PreTrainedTokenizerBase,
            environment: Environment | None) -> GreedyBaseline | None:
    """Create the greedy baseline, for estimators that need it."""
    needed = ADVANTAGES.get(config.algorithm.advantage_estimator).needs_greedy
    return GreedyBaseline(engine, rewards, tokenizer, environment) if needed else None


def _overlapped(config: Config, strategy: StrategyBase, logprobs: LogprobPass, timer: Timer) -> OverlappedPasses | None:
    """Create the listener that runs the passes of finished responses during generation (``--overlap_passes``)."""
    rollout = config.rollout
    return OverlappedPasses(strategy, logprobs, rollout.samples, timer) if rollout.overlap_passes else None


@answers_names
class SPMDPPOTrainer(PPOTrainer):
    """Trainer of a run: ``SPMDPPOTrainer(config, strategy, models, tokenizer, prompts, eval_prompts).fit()``.

    Args:
        config: the whole tree, validated.
        strategy: a strategy that is set up.
        models: result of :func:`build_models`.
        prompts: training prompts; ``eval_prompts``: held-out ones.
        timer: timer of the session (the watchdog reads it).
        rewards: scores responses (default: the rewards that the options ask for).
        environment: answers responses, which then resume with another turn (default: one turn).
        media: source of the pictures, videos and sounds of the prompts.
        pretraining: rows of :func:`lightrft.trainer.pretraining_loss.read_pretraining`, whose loss joins the policy's.

    With a strategy as the first argument it is a :class:`~lightrft.trainer.by_hand.TrainerByHand`, which takes the
    arguments of LightRFT's trainer: ``SPMDPPOTrainer(strategy, actor).fit()``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "SPMDPPOTrainer":
        """Choose the class for the arguments, as the paths of :mod:`pathlib` do."""
        by_hand = cls is SPMDPPOTrainer and ("actor" in kwargs or isinstance(next(iter(args), None), StrategyBase))
        return super().__new__(resolve_name("lightrft.trainer.by_hand:TrainerByHand") if by_hand else cls)

    def __init__(self, config: Config, strategy: StrategyBase, models: Models, tokenizer: PreTrainedTokenizerBase,
                 prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt] = (), timer: Timer | None = None,
                 rewards: RewardManager | None = None, environment: Environment | None = None,
                 media: MediaSource | None = None, pretraining: Sequence[SFTExample] = ()) -> None:
        loader = PromptLoader(prompts, config.rollout.rollout_batch_size, config.data.shuffle, config.train.seed)
        total = steps_of_data(config, len(prompts))
        check_total(config, total)
        rows = (("train", prompts), ("eval", eval_prompts), ("pretraining", pretraining))
        check_rows(models.actor, str(config.model.pretrain), tokenizer,
                   ((place_of(row.uid, split), row.token_ids) for split, some in rows for row in some))
        ready, timer = _prepare(config, strategy, models, tokenizer, media, total), timer or Timer()
        store = media if isinstance(media, MediaStore) else None
        rewards = rewards or RewardManager(config.reward, setup=ScorerSetup.of(config, strategy.device, strategy,
                                                                               store))
        _try_rewards(config, rewards, prompts, eval_prompts)
        offloader = ModelOffloader(config, strategy, ready.resident, timer)
        engine = _start_engine(config, strategy, ready.actor.model, tokenizer, offloader)
        logprobs = LogprobPass(config, strategy, ready.actor, ready.critic, ready.reference, offloader, ready.teacher)
        maker = FastExperienceMaker(
            config, strategy, engine, rewards, tokenizer, logprobs,
            get_advantage_calculator(config.algorithm, config.reward, config.rollout.generate_max_len), timer,
            _greedy(config, engine, rewards, tokenizer, environment), _overlapped(config, strategy, logprobs, timer),
            environment, media)
        evaluator = Evaluator(config, strategy, engine, rewards, tokenizer, eval_prompts,
                              environment) if eval_prompts else None
        update = PolicyUpdate(config, strategy, ready.actor, ready.critic, timer,
                              PretrainingLoss(config, strategy, pretraining) if pretraining else None)
        super().__init__(config, strategy, ready.trained, engine, maker, update, loader,
                         get_kl_controller(config.algorithm), evaluator, tokenizer, RolloutLog(config, strategy), timer,
                         total)

    def fit(self) -> None:
        """Train, then shut down the reward workers and the engine."""
        try:
            super().fit()
        finally:
            self.maker.rewards.shutdown()
            self.engine.shutdown()


SPMDPPOTrainerVL = SPMDPPOTrainer  # one path for all modalities
