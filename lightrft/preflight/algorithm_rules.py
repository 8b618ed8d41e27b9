"""Checks for choices of algorithms that are unknown, contradict each other or have no effect."""
from collections.abc import Iterator

from lightrft.algorithms import ADVANTAGES, CORRECTIONS, POLICY_LOSSES
from lightrft.algorithms.base import REGISTRIES, Advantage, Correction
from lightrft.config.layers import changed
from lightrft.config.options import show
from lightrft.config.schema import AlgorithmConfig, Config
from lightrft.preflight.cost import known_kinds
from lightrft.preflight.shared_rules import chosen_problems, if_set, unread
from lightrft.rewards.spec import parse_models


def trains_critic(c: Config) -> bool:
    """Return True if a critic is trained, as some advantage estimators need."""
    return ADVANTAGES.get(c.algorithm.advantage_estimator).needs_critic


def algorithm_problems(c: Config) -> Iterator[str]:
    """Yield every problem with the algorithm options."""
    yield from _options(c)
    for flag, registry in REGISTRIES.items():
        yield from chosen_problems(c, flag, registry)
    estimator, correction = c.algorithm.advantage_estimator, c.algorithm.rollout_correction
    if estimator in ADVANTAGES:
        yield from _estimator(c, estimator, ADVANTAGES.get(estimator))
        yield from _rewards(c, estimator, ADVANTAGES.get(estimator))
        if c.rollout.environment is not None and ADVANTAGES.get(estimator).needs_greedy:
            yield (f"--environment: {estimator} compares with a greedy response, which would need an environment of "
                   "its own; use --advantage_estimator group_norm")
        yield from _steps(c, estimator, ADVANTAGES.get(estimator)) if c.reward.step_reward == "per_step" else ()
    if correction in CORRECTIONS:
        yield from _bounds(c, correction, CORRECTIONS.get(correction))


def algorithm_warnings(c: Config) -> Iterator[str]:
    """Yield warnings about choices that are allowed but rarely intended."""
    if not POLICY_LOSSES.get(c.algorithm.policy_loss).needs_old and c.optimizer_steps > 1:
        yield (f"--policy_loss {c.algorithm.policy_loss} has no ratio, and a rollout is used for {c.optimizer_steps} "
               "optimizer steps: from the second one on the gradient is biased, because the policy has changed. For "
               f"an exact gradient use --train_batch_size {c.rollout.samples} --max_epochs 1, or --policy_loss ppo")
    a = c.algorithm
    if a.init_kl_coef and not a.use_kl_loss and a.kl_kind in ("k2", "k3"):
        yield (f"--kl_estimator {a.kl_kind} in the reward: its policy gradient is not the gradient of the KL; only "
               "k1's is. Add --kl_estimator k1, or --use_kl_loss")
    if not trains_critic(c):
        yield from if_set(
            c, _of_no_critic(c), "has no effect with --advantage_estimator "
            f"{a.advantage_estimator}, which has no critic; drop it")
    yield from _restricted(c)


def _of_no_critic(c: Config) -> list[str]:
    """Name the options of a critic that other trainers' commands set whether there is one or not. Without an estimator
    such a command means PPO, which is not the default here, so the learning rate is an error then."""
    chosen = c.algorithm.advantage_estimator != AlgorithmConfig.advantage_estimator
    return ["value_head_prefix", *(["critic_learning_rate"] if chosen else [])]


def _restricted(c: Config) -> Iterator[str]:
    """Warn of a correction by log-probs of the engine that belong to a restricted distribution."""
    if c.algorithm.rollout_correction == "none":
        return
    for name, value in changed(c, ("top_p", "top_k", "min_p")):
        yield (f"--{name} {show(value)} with --rollout_correction {c.algorithm.rollout_correction}: the engine samples "
               "from a restricted distribution, so weights are mostly below 1 even if engine and trainer agree, and "
               f"nothing corrects for tokens that are never sampled. Drop --{name}, or expect it and lower the bounds "
               "(--correction_low, --correction_veto)")


def _options(c: Config) -> Iterator[str]:
    a = c.algorithm
    yield from _kl(c)
    yield from _aggregation(c)
    if a.entropy_target is not None and a.entropy_coef > a.entropy_coef_max:
        yield (f"--entropy_coef {a.entropy_coef}: above --entropy_coef_max {a.entropy_coef_max}, the largest adaptive "
               f"weight; nearest valid value: {a.entropy_coef_max}")
    if a.high_entropy_token_ratio and a.rollout_correction == "bypass":
        yield (f"--high_entropy_token_ratio {a.high_entropy_token_ratio}: needs the old-policy pass, which "
               "--rollout_correction bypass skips; drop one of them")
    if c.log.mark_high_entropy_tokens and a.rollout_correction == "bypass":
        yield (
            "--mark_high_entropy_tokens: needs the old-policy pass, which --rollout_correction bypass skips; drop one "
            "of them")
    if a.policy_loss == "cispo" and a.cispo_absolute:
        yield from _absolute(c)
    if c.rollout.dynamic_sampling and 0 < 2 * c.reward.reward_clip <= a.zero_spread:
        yield (
            f"--zero_spread {a.zero_spread:g}: with --reward_clip {c.reward.reward_clip:g} no rewards differ by more "
            f"than {2 * c.reward.reward_clip:g}, so --dynamic_sampling would reject every group; nearest valid "
            f"value: a little below {2 * c.reward.reward_clip:g}")
    if a.clip_cov_low >= a.clip_cov_high:
        yield (f"--clip_cov_low {a.clip_cov_low}: no covariance lies between it and --clip_cov_high {a.clip_cov_high}; "
               "nearest valid value: a little less than that")
    if a.advantage_estimator == "grpo_passk":
        yield from _pass_k(a.pass_k, c.rollout.n_samples_per_prompt)


def _kl(c: Config) -> Iterator[str]:
    """Yield KL estimators that do not fit the use of the KL (loss or reward), and options without effect there."""
    a = c.algorithm
    if a.use_kl_loss and a.kl_kind == "k1":
        yield ("--kl_estimator k1: as a loss its gradient is zero on average; nearest valid value: k1+ (its value, the "
               "gradient of k2) or k3, or drop --use_kl_loss to subtract it from the reward")
    if a.init_kl_coef and not a.use_kl_loss and a.kl_kind.endswith("+"):
        yield (f"--kl_estimator {a.kl_kind}: the + changes the gradient of a KL loss, but the KL is in the reward; "
               f"nearest valid value: {a.kl_kind[:-1]}, or add --use_kl_loss")
    if a.init_kl_coef and a.use_kl_loss:
        yield from if_set(c, ["kl_in_outcome"], "has no effect with --use_kl_loss, which does not change the reward; "
                          "drop one of them")
    if a.init_kl_coef and not a.kl_kind.startswith("k3"):
        yield from if_set(c, ["k3_max"], f"has no effect on {a.kl_kind}; add --kl_estimator k3 or drop it")


def _aggregation(c: Config) -> Iterator[str]:
    """Yield an aggregation of the entropy bonus that is that of the loss anyway, and sequences that nothing counts."""
    if c.algorithm.loss_agg_mode == "token-mean":
        yield from if_set(c, ["entropy_token_mean"], "has no effect under --loss_agg_mode token-mean, which the bonus "
                          "follows; drop it")
    if not c.algorithm.loss_agg_norm_seqs:
        yield from if_set(
            c, ["loss_agg_all_seqs"], "has no effect with --no_loss_agg_norm_seqs, which does not divide "
            "by sequences; drop one of them")


def _absolute(c: Config) -> Iterator[str]:
    """Yield problems of CISPO with a bound on the ratio itself."""
    high = c.algorithm.eps_clip_high
    if high is None or high <= 1:
        yield (f"--eps_clip_high {show(high)}: with --cispo_absolute this bounds the ratio itself, and would clip even "
               "an unchanged policy (ratio 1); nearest valid value: a little above 1; usual is 5")
    yield from if_set(c, ["eps_clip"],
                      "has no effect with --cispo_absolute, which has no lower bound; drop one of them")


def _pass_k(k: int, samples: int) -> Iterator[str]:
    if k == 1:
        yield (
            "--pass_k 1: the best of one response is that response; nearest valid value: 2, or --advantage_estimator "
            "rloo")
    if k > samples > 1:
        yield (f"--pass_k {k}: --n_samples_per_prompt gives {samples} responses to choose from; nearest valid value: "
               f"{samples}, or --n_samples_per_prompt {k}")


def _estimator(c: Config, estimator: str, entry: Advantage) -> Iterator[str]:
    """Yield options that do not go together with the chosen estimator."""
    a = c.algorithm
    if entry.needs_group and c.rollout.n_samples_per_prompt == 1:
        yield (f"--n_samples_per_prompt 1: {estimator} compares responses of one prompt; nearest valid value: 2, "
               "or --advantage_estimator gae (PPO) or reinforce")
    if entry.whitens and a.advantages_norm:
        yield f"--advantages_norm true: {estimator} already whitens its advantages; use --no_advantages_norm"
    if not entry.whitens and not a.advantages_norm:
        yield from if_set(c, ["whiten_unbiased"], f"nothing is whitened with {estimator}; add --advantages_norm or "
                          "drop it")
    of_critic = unread(c, "critic" if entry.needs_critic else "", ("critic", ))
    for option, value in ((option, value) for option, value in of_critic if option.name not in _of_no_critic(c)):
        users = " or ".join(sorted(name for name in ADVANTAGES if ADVANTAGES.get(name).needs_critic))
        yield (f"{option.flag} {show(value)}: {estimator} trains no critic; drop it, or use --advantage_estimator "
               f"{users}")
    if "norm_group_std" in (entry.reads or ()) and not a.norm_group_std:
        yield from if_set(c, ["std_eps"], f"{estimator} does not divide by a standard deviation; add "
                          "--norm_group_std or drop it")


def _rewards(c: Config, estimator: str, entry: Advantage) -> Iterator[str]:
    """Yield options of reward shaping that the chosen estimator does not see or cannot use."""
    if not entry.needs_group:
        yield from if_set(c, ["kl_in_outcome"],
                          f"{estimator} has no group statistics that the KL could be subtracted before; drop it")
    if entry.needs_parts:
        yield from if_set(
            c, ("reward_clip", "reward_running_norm", "kl_in_outcome"), f"has no effect with {estimator}, "
            "which standardises the parts of the reward instead of their sum; drop it")
    if entry.needs_positive:
        for name in ("overlong_buffer", "reward_running_norm_minus_mean"):
            if vars(c.reward)[name]:
                yield (f"--{name} true: makes rewards negative, and {estimator} divides by their mean; use "
                       f"--no_{name}, or --advantage_estimator dr_grpo")
        if c.algorithm.kl_in_outcome and c.algorithm.init_kl_coef:
            yield (f"--kl_in_outcome true: makes rewards negative, and {estimator} divides by their mean; use "
                   "--no_kl_in_outcome, or --advantage_estimator dr_grpo")


def _steps(c: Config, estimator: str, entry: Advantage) -> Iterator[str]:
    """Yield what does not go together with rewards of single steps."""
    if not entry.takes_steps:
        known = sorted(name for name in ADVANTAGES if ADVANTAGES.get(name).takes_steps)
        yield (f"--step_reward per_step: {estimator} is defined for one reward per response; use --step_reward min, or "
               f"--advantage_estimator {' or '.join(known)}")
    yield from if_set(c, ("reward_clip", "reward_running_norm"), "changes the reward of a response, not those of its "
                      "steps (--step_reward per_step); drop it")
    if entry.needs_group and entry.takes_steps:
        r, models = c.reward, parse_models(c.reward.reward_pretrain)
        others = [part for part in r.reward if part.partition("=")[0] not in models] + r.remote_rm_url
        named = [f"--reward {part}" for part in others] + [f"--{name} {show(value)}" for name, value in changed(
            c, ("overlong_buffer", "kl_in_outcome", "reward_recipe"))]  # yapf: disable
        if named or len(models) > 1:
            also = named[0] if named else f"--reward_pretrain {' '.join(models)}"
            yield (
                f"{also}: {estimator} standardises the rewards of steps within a group (--step_reward per_step), and "
                "that is not defined together with rewards of whole responses; drop it, or use "
                "--advantage_estimator reinforce++")


def _bounds(c: Config, chosen: str, entry: Correction) -> Iterator[str]:
    """Yield bounds of a correction that leave only weights of exactly 1, or half of the weights near 1."""
    a = c.algorithm
    if entry.masks:
        for name, value, side in (("correction_low", a.correction_low, "below"), ("correction_high", a.correction_high,
                                                                                  "above")):
            if value == 1:
                yield (f"--{name} 1: {chosen} masks weights outside its bounds, and even without mismatch weights "
                       f"lie on both sides of 1; nearest valid value: a little {side} 1")
    elif a.correction_low == a.correction_high == 1:
        yield (
            f"--correction_low 1: with --correction_high 1 every weight of {chosen} is 1, so it has no effect; nearest "
            "valid value: 0, or --rollout_correction none")


def placed_problems(c: Config, world_size: int) -> Iterator[str]:
    """Yield problems of reward models with the strategy and the estimator."""
    r = c.reward
    if r.reward_shard and not c.strategy.divides_weights(world_size):
        yield (f"--reward_shard: --strategy {c.strategy.resolved(world_size)} on {world_size} "
               f"rank{'s' if world_size > 1 else ''} shards no weights; drop it, or use --strategy fsdp, or deepspeed "
               "with --zero_stage 3")
    if c.algorithm.advantage_estimator not in ADVANTAGES:
        return  # an error of its own
    judges = [path for path, kind in known_kinds(parse_models(r.reward_pretrain).values()).items() if kind.judge]
    if judges and ADVANTAGES.get(c.algorithm.advantage_estimator).needs_greedy:
        yield (f"--reward_pretrain {judges[0]}: a judge of lightrft grm compares responses of a group, and "
               f"{c.algorithm.advantage_estimator} subtracts the reward of a response outside the group; use "
               "--advantage_estimator group_norm or rloo, or another reward model")
