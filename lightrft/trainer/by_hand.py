"""The trainer for scripts that call LightRFT's constructors one after the other."""
import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from lightrft.config.cli import ParsedConfig
from lightrft.config.compat import grant, nearest, of_alias, refusal
from lightrft.config.namespace import config_of
from lightrft.config.options import ConfigError
from lightrft.config.schema import Config
from lightrft.config.shared_schema import grants
from lightrft.config.tree import options
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.by_path import adapters_of, finish
from lightrft.strategy.base import StrategyBase
from lightrft.trainer.environment import AnyEnvironment
from lightrft.trainer.rl_models import Models
from lightrft.trainer.session import training_session
from lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainer, trainer_arguments
from lightrft.trainer.trial import TrialContext
from lightrft.utils.errors import end_in_one_line, UserError
from lightrft.utils.logging import get_logger

Reward = Callable[..., Any]
_RENAMED = {"max_new_tokens": "generate_max_len"}
_GRANTED = {
    "tokenizer": "that of the actor's path is used, with --chat_template",
    "processor": "that of the actor's path is used",
    "do_sample": "responses are always sampled; --temperature is theirs",
    "pad_token_id": "sequences are packed, without padding",
    "eos_token_id": "responses end at the end tokens of the model, and at --stop",
    "max_length": "--prompt_max_len and --generate_max_len bound a sequence",
    "ema_beta": "there is no averaged copy of the weights",
    "reward_recipe": "reward_fn scores all responses; --reward_recipe chooses rewards by row",
    "reward_fn_label_map": "label_map holds the names of --reward_pretrain",
    "reward_tokenizers": "a reward model is read with its own tokenizer",
    "dataloader_pin_memory": "batches are prepared ahead of time",
    "buffer_limit": "a rollout is trained on before the next one",
    "buffer_cpu_offload": "experience rests in host memory",
    "num_update_steps_per_episodes": "it follows from the data and the batch sizes",
    "consumed_samples": "a resumed run knows it, with --load_checkpoint",
}
_ELSEWHERE = {
    "reward_model": "name it in --reward_pretrain",
    "ema_model": "an averaged copy of the weights is not part of this release; leave it None",
    "actor_optim": "the trainer makes it, from --actor_learning_rate, --adam_betas and --l2; leave it None",
    "critic_optim": "the trainer makes it, from --critic_learning_rate, --adam_betas and --l2; leave it None",
    "actor_scheduler": "the trainer makes it, from --lr_scheduler and --lr_warmup_ratio; leave it None",
    "critic_scheduler": "the trainer makes it, from --lr_scheduler and --lr_warmup_ratio; leave it None",
    "remote_rm_url": "give it as --remote_rm_url",
    "prompts_dataloader": "name the data in --prompt_data; the trainer reads and batches them",
    "eval_dataloader": "name the data in --eval_data; the trainer reads and batches them",
    "pretrain_dataloader": "name the data in --pretrain_data; the trainer reads and batches them",
}


class TrainerByHand(SPMDPPOTrainer):
    """The trainer of a script with LightRFT's calls, of which ``...`` are options, by name::

        args = add_arguments(parser).parse_args()
        strategy = get_strategy(args)
        SPMDPPOTrainer(strategy, ActorLanguage(args.pretrain), ...).fit()

    Args:
        strategy: result of :func:`lightrft.strategy.get_strategy`; its ``args`` are the options of the run.
        actor: the policy, made from its path.
        critic: None, or a critic in place of that of the options.
        initial_model: None, or a frozen reference in place of that of the options.
        reward_fn: a function of a known signature (:mod:`lightrft.rewards.workers.user_file`), a reward of the run.
        environment: as of :class:`SPMDPPOTrainer`.
        arguments: options, which win over ``args``; other arguments of LightRFT's trainer are accepted where they ask
            for what always holds.

    Raises:
        UserError: an argument is unknown, or is made by the trainer here; the message says from what.
    """

    def __init__(self, strategy: StrategyBase, actor: ActorLanguage, critic: nn.Module | None = None,
                 reward_model: Any = None, initial_model: ActorLanguage | None = None, ema_model: Any = None,
                 actor_optim: Any = None, critic_optim: Any = None, actor_scheduler: Any = None,
                 critic_scheduler: Any = None, *, reward_fn: Reward | None = None,
                 environment: AnyEnvironment | None = None, **arguments: Any) -> None:
        end_in_one_line()
        _refuse_made({"reward_model": reward_model, "ema_model": ema_model, "actor_optim": actor_optim,
                      "critic_optim": critic_optim, "actor_scheduler": actor_scheduler,
                      "critic_scheduler": critic_scheduler})  # yapf: disable
        functions = {} if reward_fn is None else {"reward_fn": reward_fn}
        parsed = _options(strategy, actor, arguments, [*functions])
        context, exits = TrialContext(functions=functions), int(os.environ.get("WORLD_SIZE", "1")) > 1
        with ExitStack() as stack:
            session = stack.enter_context(training_session(parsed, exits, context, strategy))
            finish(actor, parsed.config.model)
            own = Models(actor, critic, initial_model and initial_model.requires_grad_(False).eval())
            parts = trainer_arguments(parsed.config, session.strategy, session.timer, functions, own)
            super().__init__(**parts | ({} if environment is None else {"environment": environment}))
            self._session = stack.pop_all()

    def fit(self, args: Any = None, *loaders: Any, **arguments: Any) -> None:
        """Train to the end, and end the session; ``args`` of LightRFT's call are those of the strategy."""
        names = ("prompts_dataloader", "pretrain_dataloader", "eval_dataloader")
        with self._session:
            _refuse_made(dict(zip(names, loaders)) | arguments)
            super().fit()


def _refuse_made(arguments: dict[str, Any]) -> None:
    """Raise an error for an argument that the trainer makes itself, and for an unknown one; notice what is granted."""
    for name, value in arguments.items():
        if name in _ELSEWHERE and value is not None and value != []:
            raise UserError(f"{name}: {_ELSEWHERE[name]}")
        if name in _GRANTED and value:
            get_logger().info("%s has no effect: %s", name, _GRANTED[name])
        if name not in {**_ELSEWHERE, **_GRANTED}:
            raise UserError(_unknown(name))


def _unknown(name: str) -> str:
    known = {*options(Config), *_GRANTED, *_ELSEWHERE, *_RENAMED, "critic", "initial_model", "reward_fn", "environment"}
    return refusal(name, known) or f"unknown argument {name}{nearest(name, known)}"


def _options(strategy: StrategyBase, actor: ActorLanguage, arguments: dict[str, Any],
             rewards: list[str]) -> ParsedConfig:
    """Return the options of the run: the namespace of the strategy, what the actor was made with, and ``arguments``."""
    if not isinstance(strategy, StrategyBase) or not isinstance(actor, ActorLanguage):
        raise UserError(f"SPMDPPOTrainer({type(strategy).__name__}, {type(actor).__name__}): the first arguments are "
                        "get_strategy(args) and ActorLanguage(PATH) or ActorVL(PATH)")
    args, path = strategy.args, actor.made_with.get("pretrain")
    given = dict(vars(args)) if args else {}
    if path is None:
        raise UserError("actor: it was made of a model; make it of a path, ActorLanguage(PATH)")
    if given.get("pretrain") not in (None, path):
        raise UserError(f"--pretrain {given['pretrain']}: the actor is of {path}. Remedy: ActorLanguage(args.pretrain)")
    keywords = _keywords(arguments) | adapters_of(actor) | {"pretrain": path}
    if rewards:
        keywords["reward"] = [*(given.get("reward") or []), *rewards]
    return config_of(args or argparse.Namespace(), keywords)


def _keywords(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are options, by their names; notice those that are granted."""
    known, keywords, others, problems = options(Config), dict[str, Any](), dict[str, Any](), list[str]()
    for name, value in arguments.items():
        own, value = of_alias(_RENAMED.get(name, name), value)
        if own in known and not (own in _GRANTED and isinstance(value, dict)):  # recipes of LightRFT are dicts
            keywords |= {} if value is None else {own: value}
        elif name in _GRANTED or name in _ELSEWHERE:
            others[name] = value
        elif value and not grant(name, value, grants(Config)):
            problems.append(_unknown(name))
    if problems:
        raise ConfigError(problems)
    _refuse_made(others)
    return keywords
