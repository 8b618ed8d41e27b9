"""Reward models of ``--reward_pretrain``: their kinds, the options that each kind needs, and their loading."""
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightrft.config.options import show
from lightrft.config.schema import RewardConfig
from lightrft.models.config_json import reward_kind
from lightrft.models.reward_model import RewardKind
from lightrft.rewards.generative import ComparingJudge, GradingJudge
from lightrft.rewards.neural import NeuralReward, QueuedReward
from lightrft.rewards.placement import ScorerSetup
from lightrft.rewards.spec import named_models
from lightrft.rewards.steps import StepReward
from lightrft.utils.errors import UserError


def reward_model(path: str, cfg: RewardConfig, setup: ScorerSetup) -> QueuedReward[Any]:
    """Load the reward model at ``path``, its config.json determines the kind."""
    kind = reward_kind(path)
    if kind.steps is not None:
        return StepReward(path, kind.steps, cfg, setup)
    if kind.judge is not None:
        return ComparingJudge(path, kind.judge, cfg, setup)
    return GradingJudge(path, cfg, setup) if kind.language else NeuralReward(path, cfg, setup)


def check_models(cfg: RewardConfig, paths: Iterable[str]) -> None:
    """Raise the first of :func:`model_problems` as a :class:`UserError`."""
    for problem in model_problems(cfg, {path: reward_kind(path) for path in paths}):
        raise UserError(problem)


def model_problems(cfg: RewardConfig, kinds: Mapping[str, RewardKind]) -> Iterator[str]:
    """Yield options that no reward model reads, and options that one lacks; ``kinds``: of all models, by path."""
    if not kinds:
        return
    found = [*kinds.values()]
    if not any(kind.steps for kind in found):
        yield from _unread(cfg, ("step_reward", "step_separator"), "process reward model. Remedy: name one that "
                           "lightrft prm has trained")
    if not any(kind.generates for kind in found):
        yield from _unread(cfg, ("judge_max_len", ), "generative one. Remedy: name one that lightrft grm has trained")
    if not (cfg.judge_url or any(kind.language for kind in found)):
        yield from _unread(cfg, ("judge_template", "judge_score"),
                           "language model that grades by them. Remedy: name one")
    for path, kind in kinds.items():
        yield from _fit(cfg, path, kind)
    names = [name for name, _ in named_models(cfg.reward_pretrain)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        yield (f"--reward_pretrain {' '.join(cfg.reward_pretrain)}: two models are named {twice!r}; give one of them "
               "another name, by NAME=PATH")


def _unread(cfg: RewardConfig, names: Iterable[str], kind: str) -> Iterator[str]:
    given = [(name, vars(cfg)[name]) for name in names]
    unread = [f"--{name} {show(value)}" for name, value in given if value != getattr(RewardConfig, name)]
    if unread:
        yield f"{', '.join(unread)}: no model of --reward_pretrain is a {kind}, or drop the option"


def _fit(cfg: RewardConfig, path: str, kind: RewardKind) -> Iterator[str]:
    """Yield missing and superfluous options of one reward model."""
    if kind.language and cfg.judge_template is None:
        yield (f"--reward_pretrain {path}: according to its config.json it is a language model without a reward head, "
               "and not a judge of lightrft grm. Name a model of lightrft rm, prm or grm, or a sequence classifier "
               "with one score; or let it grade responses with --judge_template FILE")
    if cfg.normalize_reward:
        yield from unscaled(path, kind)


def unscaled(path: str, kind: RewardKind) -> Iterator[str]:
    """Yield the reason why the rewards of a model cannot be normalised, if there is one."""
    if kind.generates:
        yield f"--normalize_reward: {path!r} is a generative reward model, which has no mean and std; drop the option"
    elif kind.steps is not None:
        yield (f"--normalize_reward: {path!r} is a process reward model, whose rewards are probabilities; drop the "
               "option")
    elif not kind.measured:
        yield (f"--normalize_reward: {path!r} has no mean and std of rewards in its config.json: its "
               "training did not measure them. Drop the option, or train it with lightrft rm")


def description(kind: RewardKind, cfg: RewardConfig) -> str:
    """Describe a reward model of this kind for the report."""
    writes = f"in at most {cfg.judge_max_len} tokens"
    if kind.steps is not None:
        return f"judges the steps of responses ({cfg.step_reward})"
    if kind.judge is not None:
        return f"compares responses to a prompt with each other, {writes}"
    return f"grades responses, {writes}" if kind.language else "scores responses with its head"
