"""Checks for choices of algorithms that are unknown, contradict each other or have no effect."""
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lightrft.config.flags import show
from lightrft.config.dependencies import CRITIC_OPTIONS, CORRECTION_OPTIONS, ESTIMATOR_OPTIONS, LOSS_OPTIONS, changed
from lightrft.config.options import did_you_mean
from lightrft.config.schema import Config
from lightrft.utils.registry import Registry


class Reads(Protocol):
    """Entry of any registry, with the algorithm options that it reads."""
    reads: tuple[str, ...] | None


class Surrogate(Reads, Protocol):
    """Entry of the registry of policy losses."""
    needs_old: bool


class Weight(Reads, Protocol):
    """Entry of the registry of corrections."""
    masks: bool


class Needs(Reads, Protocol):
    """Entry of the registry of advantage estimators."""
    needs_group: bool
    needs_critic: bool
    whitens: bool
    needs_parts: bool
    needs_positive: bool


@dataclass(frozen=True)
class AlgorithmFacts:
    """Entries of the registries of :mod:`lightrft.algorithms` and their properties, passed down to this layer."""
    estimators: frozenset[str]
    policy_losses: frozenset[str]
    corrections: frozenset[str]
    needs_group: frozenset[str]
    needs_critic: frozenset[str]
    whitens: frozenset[str]
    ignores: dict[str, frozenset[str]]  # {ESTIMATOR,LOSS,CORRECTION}_OPTIONS -> entries that declare not to read it
    needs_parts: frozenset[str] = frozenset()
    needs_positive: frozenset[str] = frozenset()
    no_ratio: frozenset[str] = frozenset()  # policy losses
    masks: frozenset[str] = frozenset()  # corrections

    @classmethod
    def gather(cls, advantages: Registry[Any], policy_losses: Registry[Any],
               corrections: Registry[Any]) -> "AlgorithmFacts":
        """Read the three registries, whose entries are :class:`Needs`, :class:`Surrogate` and :class:`Weight`."""
        entries: dict[str, Needs] = {name: advantages.get(name) for name in advantages}
        losses: dict[str, Surrogate] = {name: policy_losses.get(name) for name in policy_losses}
        weights: dict[str, Weight] = {name: corrections.get(name) for name in corrections}
        return cls(
            frozenset(entries), frozenset(policy_losses), frozenset(corrections),
            frozenset(name for name, entry in entries.items() if entry.needs_group),
            frozenset(name for name, entry in entries.items() if entry.needs_critic),
            frozenset(name for name, entry in entries.items() if entry.whitens),
            _ignored(entries, ESTIMATOR_OPTIONS) | _ignored(losses, LOSS_OPTIONS)
            | _ignored(weights, CORRECTION_OPTIONS),
            frozenset(name for name, entry in entries.items() if entry.needs_parts),
            frozenset(name for name, entry in entries.items() if entry.needs_positive),
            frozenset(name for name, loss in losses.items() if not loss.needs_old),
            frozenset(name for name, weight in weights.items() if weight.masks))


def _ignored(entries: Mapping[str, Reads], options: Iterable[str]) -> dict[str, frozenset[str]]:
    """Map each option to the names of the entries that declare not to read it."""
    said = {name: entry.reads for name, entry in entries.items() if entry.reads is not None}
    return {option: frozenset(name for name, reads in said.items() if option not in reads) for option in options}


def algorithm_problems(c: Config, facts: AlgorithmFacts | None) -> Iterator[str]:
    """Yield every problem with the algorithm options; without ``facts``, names and their needs are not checked."""
    yield from _options(c)
    if facts:
        yield from _registries(c, facts)
        yield from _estimator(c, facts)
        yield from _rewards(c, facts)
        yield from _bounds(c, facts)


def algorithm_warnings(c: Config, facts: AlgorithmFacts) -> Iterator[str]:
    """Yield warnings about choices that are allowed but rarely intended."""
    rollout, batch = c.rollout.rollout_batch_size * c.rollout.n_samples_per_prompt, c.train.train_batch_size
    steps = c.train.max_epochs * rollout // batch
    if c.algorithm.policy_loss in facts.no_ratio and steps > 1:
        yield (f"--policy_loss {c.algorithm.policy_loss} has no ratio, and a rollout is used for {steps} optimizer "
               "steps: from the second one on the gradient is of a policy that is gone. For the exact one use "
               f"--train_batch_size {rollout} --max_epochs 1, or --policy_loss ppo")
    a = c.algorithm
    if a.init_kl_coef and not a.use_kl_loss and a.kl_kind in ("k2", "k3"):
        yield (f"--kl_estimator {a.kl_kind} in the reward: its policy gradient is not that of the KL, and k1's is; add "
               "--kl_estimator k1, or --use_kl_loss")


def _options(c: Config) -> Iterator[str]:
    a = c.algorithm
    yield from _kl(c)
    yield from _aggregation(c)
    if a.entropy_target is not None and a.entropy_coef > a.entropy_coef_max:
        yield (f"--entropy_coef {a.entropy_coef}: above --entropy_coef_max {a.entropy_coef_max}, the largest adaptive "
               f"weight; nearest valid value: {a.entropy_coef_max}")
    if a.high_entropy_token_ratio and a.rollout_correction == "bypass":
        yield (f"--high_entropy_token_ratio {a.high_entropy_token_ratio}: needs the pass that --rollout_correction "
               "bypass leaves out; drop one of them")
    if a.policy_loss == "cispo" and a.cispo_absolute:
        yield from _absolute(c)
    if c.rollout.dynamic_sampling and 0 < 2 * c.reward.reward_clip <= a.zero_spread:
        yield (
            f"--zero_spread {a.zero_spread:g}: with --reward_clip {c.reward.reward_clip:g} no rewards differ by more "
            f"than {2 * c.reward.reward_clip:g}, so no group of --dynamic_sampling would count; nearest valid "
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
        yield (f"--kl_estimator {a.kl_kind}: the + changes the gradient of a loss, and a reward has none; nearest "
               f"valid value: {a.kl_kind[:-1]}, or add --use_kl_loss")
    if a.init_kl_coef and a.use_kl_loss:
        for name, value in changed(c, ("kl_in_outcome", )):
            yield f"--{name} {value}: has no effect with --use_kl_loss, which leaves the reward alone; drop one of them"
    if a.init_kl_coef and not a.kl_kind.startswith("k3"):
        for name, value in changed(c, ("k3_max", )):
            yield f"--{name} {value}: has no effect on {a.kl_kind}; add --kl_estimator k3 or drop it"


def _aggregation(c: Config) -> Iterator[str]:
    """Yield options that the chosen mean does not use."""
    a, mode = c.algorithm, c.algorithm.loss_agg_mode
    if mode != "seq-mean-token-sum-norm":
        for name, value in changed(c, ("loss_agg_norm", "loss_agg_norm_seqs")):
            yield (f"--{name} {value}: has no effect under --loss_agg_mode {mode}; use --loss_agg_mode "
                   "seq-mean-token-sum-norm or drop it")
    if mode == "token-mean":
        for name, value in changed(c, ("loss_agg_all_seqs", )):
            yield f"--{name} {value}: has no effect under --loss_agg_mode {mode}, which counts tokens; drop it"
    for name, value in changed(c, ("entropy_token_mean", )):
        if not a.entropy_coef and a.entropy_target is None:
            yield f"--{name} {value}: has no effect, there is no bonus; add --entropy_coef 0.001 or drop it"
        elif mode == "token-mean":
            yield f"--{name} {value}: has no effect under --loss_agg_mode {mode}, which the bonus follows; drop it"


def _absolute(c: Config) -> Iterator[str]:
    """Yield problems of CISPO with a bound on the ratio itself."""
    high = c.algorithm.eps_clip_high
    if high is None or high <= 1:
        yield (f"--eps_clip_high {show(high)}: with --cispo_absolute this bounds the ratio itself, and would hold back "
               "a policy that has not moved (ratio 1); nearest valid value: a little above 1; usual is 5")
    for name, value in changed(c, ("eps_clip", )):
        yield f"--{name} {value}: has no effect with --cispo_absolute, which has no lower bound; drop one of them"


def _pass_k(k: int, samples: int) -> Iterator[str]:
    if k == 1:
        yield (
            "--pass_k 1: the best of one response is that response; nearest valid value: 2, or --advantage_estimator "
            "rloo")
    if k > samples > 1:
        yield (f"--pass_k {k}: --n_samples_per_prompt gives {samples} responses to choose from; nearest valid value: "
               f"{samples}, or --n_samples_per_prompt {k}")


def _registries(c: Config, facts: AlgorithmFacts) -> Iterator[str]:
    a = c.algorithm
    chosen = {
        "advantage_estimator": facts.estimators, "policy_loss": facts.policy_losses, "rollout_correction":
        facts.corrections
    }
    for name, known in chosen.items():
        value = vars(a)[name]
        if value not in known:
            yield f"--{name} {value}: unknown{did_you_mean(value, known)}; known: {', '.join(sorted(known))}"
    estimator = a.advantage_estimator
    if estimator in facts.needs_group and c.rollout.n_samples_per_prompt == 1:
        yield (f"--n_samples_per_prompt 1: {estimator} compares responses of one prompt; nearest valid value: 2, "
               "or --advantage_estimator reinforce")
    if estimator in facts.whitens and a.advantages_norm:
        yield f"--advantages_norm True: {estimator} already whitens its advantages; use --no_advantages_norm"
    for name, value in changed(c, ("whiten_unbiased", )):
        if estimator in facts.estimators - facts.whitens and not a.advantages_norm:
            yield f"--{name} {value}: nothing is whitened with {estimator}; add --advantages_norm or drop it"


def _estimator(c: Config, facts: AlgorithmFacts) -> Iterator[str]:
    """Yield options that the chosen estimator, policy loss or correction does not use."""
    estimator = c.algorithm.advantage_estimator
    for name, value in changed(c, CRITIC_OPTIONS):
        if estimator in facts.estimators - facts.needs_critic:
            yield (f"--{name} {value}: {estimator} trains no critic; drop it, or use --advantage_estimator "
                   f"{' or '.join(sorted(facts.needs_critic))}")
    yield from _unread(c, facts, "advantage_estimator", facts.estimators, ESTIMATOR_OPTIONS)
    if estimator in facts.estimators - facts.ignores["norm_group_std"] and not c.algorithm.norm_group_std:
        for name, value in changed(c, ("std_eps", )):
            yield f"--{name} {value}: {estimator} divides by no deviation; add --norm_group_std or drop it"
    yield from _unread(c, facts, "policy_loss", facts.policy_losses, LOSS_OPTIONS)
    yield from _unread(c, facts, "rollout_correction", facts.corrections, CORRECTION_OPTIONS)


def _rewards(c: Config, facts: AlgorithmFacts) -> Iterator[str]:
    """Yield options of reward shaping that the chosen estimator does not see or cannot use."""
    estimator = c.algorithm.advantage_estimator
    for name, value in changed(c, ("kl_in_outcome", )):
        if estimator in facts.estimators - facts.needs_group:
            yield (f"--{name} {value}: {estimator} compares no group, so there is nothing for the KL to come before; "
                   "drop it")
    if estimator in facts.needs_parts:
        for name, value in changed(c, ("reward_clip", "reward_running_norm", "kl_in_outcome")):
            yield (f"--{name} {value}: has no effect with {estimator}, which standardises the parts of the reward "
                   "instead of their sum; drop it")
    if estimator in facts.needs_positive:
        for name in ("overlong_buffer", "reward_running_norm_minus_mean"):
            if vars(c.reward)[name]:
                yield (f"--{name} True: makes rewards negative, and {estimator} divides by their mean; use "
                       f"--no_{name}, or --advantage_estimator dr_grpo")
        if c.algorithm.kl_in_outcome and c.algorithm.init_kl_coef:
            yield (f"--kl_in_outcome True: makes rewards negative, and {estimator} divides by their mean; use "
                   "--no_kl_in_outcome, or --advantage_estimator dr_grpo")


def _bounds(c: Config, facts: AlgorithmFacts) -> Iterator[str]:
    """Yield bounds of a correction that leave only weights of exactly 1, or half of the weights near 1."""
    a, chosen = c.algorithm, c.algorithm.rollout_correction
    if chosen in facts.masks:
        for name, value, side in (("correction_low", a.correction_low, "below"), ("correction_high", a.correction_high,
                                                                                  "above")):
            if value == 1:
                yield (f"--{name} 1: {chosen} masks what is outside its bounds, and weights of responses that engine "
                       f"and trainer agree on lie on both sides of 1; nearest valid value: a little {side} 1")
    elif a.correction_low == a.correction_high == 1:
        yield (
            f"--correction_low 1: with --correction_high 1 every weight of {chosen} is 1, so it has no effect; nearest "
            "valid value: 0, or --rollout_correction none")


def _unread(c: Config, facts: AlgorithmFacts, flag: str, known: frozenset[str],
            options: Iterable[str]) -> Iterator[str]:
    """Yield values of ``options`` that the algorithm chosen by ``flag`` does not read."""
    chosen = vars(c.algorithm)[flag]
    for name, value in changed(c, options):
        if chosen in facts.ignores[name]:
            users = " or ".join(sorted(known - facts.ignores[name]))
            yield f"--{name} {value}: {chosen} does not use it; drop it, or use --{flag} {users}"
