"""The trainer of a run, built of its options: every part that :class:`PPOTrainer` steps, identically on every rank."""
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from lightrft.config.schema import Config
from lightrft.config.stages import check_total, steps_of_data
from lightrft.datasets.loader import PromptLoader
from lightrft.datasets.media_store import MediaStore
from lightrft.datasets.prompts_dataset import PromptsDataset
from lightrft.datasets.rows import place_of
from lightrft.datasets.sft_dataset import SFTExample
from lightrft.environments.opening import open_pool, player_of, tools_of
from lightrft.environments.play import Player
from lightrft.models.tokenizer import load_tokenizer
from lightrft.models.vocabulary import check_rows
from lightrft.rewards.correctness import check_accuracy_part
from lightrft.rewards.manager import RewardManager
from lightrft.rewards.placement import ScorerSetup
from lightrft.rewards.spec import may_compare
from lightrft.rewards.validation import check_columns, check_references, check_spread, check_turns, probe
from lightrft.rollout.engine import RolloutEngine
from lightrft.rollout.engines import get_engine
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.advantage_calculator import get_advantage_calculator
from lightrft.trainer.environment import AnyEnvironment
from lightrft.trainer.evaluator import Evaluator
from lightrft.trainer.fast_exp_maker import FastExperienceMaker, GreedyBaseline
from lightrft.trainer.logprob_pass import LogprobPass, ModelOffloader
from lightrft.trainer.hub_files import fetch_once
from lightrft.trainer.model_media import open_media
from lightrft.trainer.overlapped_passes import OverlappedPasses
from lightrft.trainer.ppo_trainer import PPOTrainer
from lightrft.trainer.ppo_update import PolicyUpdate
from lightrft.trainer.pretraining_loss import PretrainingLoss, read_pretraining
from lightrft.trainer.rl_models import build_models, Models, prepare_models
from lightrft.trainer.samples import reward_input
from lightrft.types import MediaSource, Prompt
from lightrft.utils.lightrft_names import answers_names
from lightrft.utils.timer import Timer


def trainer_arguments(config: Config, strategy: StrategyBase, timer: Timer, functions: Mapping[str, Callable[..., Any]],
                      own: Models | None = None) -> dict[str, Any]:
    """Return the arguments of :class:`SPMDPPOTrainer` that the options ask for.

    Args:
        functions: rewards and the environment of this program, by the names under which options select them.
        own: models that the program has made; the others are those that the options need.
    """
    data, limit, path = config.data, config.rollout.prompt_max_len, str(config.model.pretrain)
    fetch_once(strategy, config, data)
    tokenizer = load_tokenizer(path, data.chat_template)
    media = open_media(path, tokenizer, data, strategy)
    pool = open_pool(config.rollout, functions)
    tools = tools_of(pool)
    read = partial(PromptsDataset, data, tokenizer, limit, media=media, tools=tools,
                   compared=may_compare(config.reward.reward))  # yapf: disable
    setup = ScorerSetup.of(config, strategy.device, strategy, media)
    return {
        "config": config, "strategy": strategy, "tokenizer": tokenizer, "media": media, "timer": timer,
        "prompts": read(),
        "eval_prompts": read("eval") if config.held_out else [],
        "environment": player_of(pool, config.rollout, tokenizer, path, media),
        "models": build_models(config, strategy, own),
        "rewards": RewardManager(config.reward, functions, setup),
        "pretraining": read_pretraining(config, tokenizer, media)
    }  # yapf: disable


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


def _start_engine(config: Config, strategy: StrategyBase, actor: nn.Module, tokenizer: PreTrainedTokenizerBase,
                  offloader: ModelOffloader) -> RolloutEngine:
    """Start the engine under the memory conditions of generation: models that are offloaded then are offloaded now."""
    offloader.offload()
    engine = get_engine(config.rollout, actor, strategy, tokenizer, bool(config.model.bf16))
    if offloader.offloaded:
        engine.sleep()
        offloader.reload()
    return engine


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
                 rewards: RewardManager | None = None, environment: AnyEnvironment | None = None,
                 media: MediaSource | None = None, pretraining: Sequence[SFTExample] = ()) -> None:
        loader = PromptLoader(prompts, config.rollout.rollout_batch_size, config.data.shuffle, config.train.seed)
        total = steps_of_data(config, len(prompts))
        check_total(config, total)
        rows: dict[str, Sequence[Prompt | SFTExample]] = {
            "train": prompts, "eval": eval_prompts, "pretraining": pretraining}  # yapf: disable
        check_rows(models.actor, str(config.model.pretrain), tokenizer,
                   ((place_of(row.uid, split), row.token_ids) for split, some in rows.items() for row in some))
        store = media if isinstance(media, MediaStore) else None
        environment = environment or player_of(open_pool(config.rollout), config.rollout, tokenizer,
                                               str(config.model.pretrain), store)  # yapf: disable
        ready, timer = prepare_models(config, strategy, models, tokenizer, media, total), timer or Timer()
        setup = ScorerSetup.of(config, strategy.device, strategy, store)
        rewards = rewards or RewardManager(config.reward, setup=setup)
        _try_rewards(config, rewards, prompts, eval_prompts)
        if isinstance(environment, Player):
            environment.check(prompts[0])
            check_turns(rewards, reward_input(prompts[0], ""), environment.role)
        self.environment = environment
        offloader = ModelOffloader(config, strategy, ready.resident, timer)
        engine = _start_engine(config, strategy, ready.actor.model, tokenizer, offloader)
        logprobs = LogprobPass(config, strategy, ready.actor, ready.critic, ready.reference, offloader, ready.teacher)
        calculator = get_advantage_calculator(config.algorithm, config.reward, config.rollout.generate_max_len)
        greedy = GreedyBaseline(engine, rewards, tokenizer, environment) if calculator.estimator.needs_greedy else None
        overlapped: OverlappedPasses | None = None
        if config.rollout.overlap_passes:
            plays = environment is not None
            overlapped = OverlappedPasses(strategy, logprobs, config.rollout.samples, timer, plays)
        maker = FastExperienceMaker(config, strategy, engine, rewards, tokenizer, logprobs=logprobs,
                                    calculator=calculator, timer=timer, greedy=greedy, overlapped=overlapped,
                                    environment=environment, media=media)
        evaluator = Evaluator(config, strategy, engine, rewards, tokenizer, eval_prompts,
                              environment) if eval_prompts else None
        update = PolicyUpdate(config, strategy, ready.actor, ready.critic, timer,
                              PretrainingLoss(config, strategy, pretraining) if pretraining else None)
        super().__init__(ready.trained, maker, update, loader, evaluator, total)

    def fit(self) -> None:
        """Train, then shut down the reward workers and the engine."""
        try:
            super().fit()
        finally:
            self.maker.rewards.shutdown()
            if isinstance(self.environment, Player):
                self.environment.shutdown()
            self.engine.shutdown()


SPMDPPOTrainerVL = SPMDPPOTrainer  # one path for all modalities
