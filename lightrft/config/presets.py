"""``--recipe NAME`` and ``--semantics NAME``: options that belong together, set at once; YAML keys and flags win.

A recipe is a paper's method, not a size: batch sizes, lengths and learning rates stay the run's own. Where a paper
leaves a coefficient open or fits it to its reward model, the number is ours. One name can stand for different
mathematics in different trainers. Semantics select the meaning of one trainer; every difference is a separate option.
Differences that no option covers are listed, with their size, in ``docs/coming_from.md``. ``benchmarks/oracles.py``
compares the presets with the trainers themselves.
"""
from collections.abc import Iterable
from typing import Any, NamedTuple

_NO_KL: dict[str, Any] = {"init_kl_coef": 0.0, "use_kl_loss": False, "kl_estimator": None}
_REWARD_KL: dict[str, Any] = {"init_kl_coef": 0.01, "use_kl_loss": False, "kl_estimator": "k1"}


class Recipe(NamedTuple):
    """Method of a paper, and the options that select it."""
    paper: str
    summary: str
    options: dict[str, Any]


def _arxiv(number: str) -> str:
    return f"https://arxiv.org/abs/{number}"


def _clipped(estimator: str, loss: str, low: float, high: float | None, aggregation: str,
             **more: Any) -> dict[str, Any]:
    """Options of a loss with bounds on the ratio."""
    return {"advantage_estimator": estimator, "policy_loss": loss, "eps_clip": low, "eps_clip_high": high,
            "loss_agg_mode": aggregation, **more}  # yapf: disable


def _plain(estimator: str, aggregation: str, **more: Any) -> dict[str, Any]:
    """Options of the policy gradient without a ratio."""
    return {"advantage_estimator": estimator, "policy_loss": "reinforce", "loss_agg_mode": aggregation, **more}


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe(
        _arxiv("2402.03300"), "rewards standardised within the group, mean over the tokens of each response, KL in the "
        "loss with the paper's coefficient",
        _clipped("group_norm", "ppo", 0.2, None, "seq-mean-token-mean", init_kl_coef=0.04, use_kl_loss=True,
                 kl_estimator="k3")),
    "dapo": Recipe(
        _arxiv("2503.14476"), "a higher upper bound, mean over all tokens, groups without spread replaced by others, "
        "soft penalty on the last fifth of the length",
        _clipped("group_norm", "ppo", 0.2, 0.28, "token-mean", **_NO_KL, dynamic_sampling=True, overlong_buffer=True,
                 overlong_buffer_len=0, overlong_buffer_penalty_factor=1.0)),
    "dr_grpo": Recipe(
        _arxiv("2503.20783"), "no division by the spread of the group, a constant in place of the response's length",
        _clipped("dr_grpo", "ppo", 0.2, None, "seq-mean-token-sum-norm", **_NO_KL)),
    "gspo": Recipe(
        _arxiv("2507.18071"), "one ratio per response, between tight bounds",
        _clipped("group_norm", "gspo", 3e-4, 4e-4, "seq-mean-token-mean", **_NO_KL)),
    "gmpo": Recipe(
        _arxiv("2507.20673"), "geometric mean over the ratios of a response, each between exp(-0.4) and exp(0.4)",
        _clipped("group_norm", "gmpo", 0.4, 0.4, "seq-mean-token-mean", **_NO_KL)),
    "cispo": Recipe(
        _arxiv("2506.13585"), "the weight is clipped, not the gradient; no lower bound, the upper one is 5 "
        "(https://arxiv.org/abs/2510.13786)",
        _clipped("group_norm", "cispo", 1.0, 4.0, "token-mean", **_NO_KL)),
    "cpgd": Recipe(
        _arxiv("2505.12504"), "clipped log-ratio, and a penalty on the drift from the policy of the rollout",
        _clipped("cpgd", "cpgd", 0.2, None, "token-mean", **_NO_KL, policy_drift_coef=0.01)),
    "reinforce++": Recipe(
        _arxiv("2501.03262"), "returns whitened over the batch, KL of each token in the reward",
        _clipped("reinforce++", "ppo", 0.2, None, "token-mean", **_REWARD_KL)),
    "reinforce_baseline": Recipe(
        _arxiv("2501.03262"), "reward minus its group's mean, whitened over the batch, KL in the loss",
        _clipped("reinforce_baseline", "ppo", 0.2, None, "token-mean", init_kl_coef=0.001, use_kl_loss=True,
                 kl_estimator="k2")),
    "rloo": Recipe(
        _arxiv("2402.14740"), "the rest of the group is the baseline, a whole response is one action, KL in the "
        "reward; exact with one optimizer step per rollout", _plain("rloo", "seq-mean-token-sum", **_REWARD_KL)),
    "remax": Recipe(
        _arxiv("2310.10505"), "the greedy response is the baseline, KL in the reward; exact with one optimizer step "
        "per rollout", _plain("remax", "seq-mean-token-sum", **_REWARD_KL)),
    "opo": Recipe(
        _arxiv("2505.23585"), "the baseline of least variance and nothing else; exact with one optimizer step per "
        "rollout", _plain("opo", "token-mean", **_NO_KL, entropy_coef=0.0)),
    "magic": Recipe(
        _arxiv("2505.22312"), "Skywork-OR1: groups without spread replaced by others, adaptive entropy bonus, "
        "temperature 1; its lengths in stages are yours to give with --stages",
        _clipped("group_norm", "ppo", 0.2, None, "token-mean", **_NO_KL, dynamic_sampling=True, temperature=1.0,
                 entropy_coef=0.0, entropy_target=0.2, entropy_step=1e-4, entropy_coef_max=0.005)),
    "ppo": Recipe(
        _arxiv("1707.06347"), "a critic, generalised advantages whitened over the batch, policy and value clipped",
        _clipped("gae", "ppo", 0.2, None, "token-mean", **_NO_KL, value_clip=0.2, gamma=1.0, lambd=0.95,
                 advantages_norm=True)),
}  # yapf: disable


Options = dict[str, Any]


class Semantics(NamedTuple):
    """Options that give names the meaning of one trainer."""
    version: str  # of the trainer; empty for this one
    options: Options
    recipes: dict[str, Options] = {}  # differences from a recipe whose name the trainer uses too
    chosen: dict[str, dict[str, Options]] = {}  # option -> its value -> what that choice sets too

    def values(self, choices: Options) -> Options:
        """Options that these semantics set, given the ``choices`` made so far."""
        return self.options | {
            name: value
            for option, found in self.chosen.items() for name, value in found.get(choices[option], {}).items()
        }  # yapf: disable


def _each(names: Iterable[str], values: Options) -> dict[str, Options]:
    return {name: values for name in names}


_TOKEN_MEAN, _SEQ_MEAN = {"loss_agg_mode": "token-mean"}, {"loss_agg_mode": "seq-mean-token-mean"}
_WHITENED, _KL_FIRST, _DIVIDED = {"advantages_norm": True}, {"kl_in_outcome": True}, {"norm_group_std": True}
_GROUPS = ("group_norm", "grpo", "dr_grpo", "rloo", "reinforce_baseline", "opo", "gpg")

SEMANTICS: dict[str, Semantics] = {
    "default": Semantics("", {}),
    "verl": Semantics(
        "verl 0.9.1",
        {"whiten_unbiased": True, "whiten_flat_groups": True, "gdpo_whiten_tokens": True, "dual_clip": 3.0,
         "dppo_ratio_max": 3.0, "kl_cov_abs": True, "k3_max": 10.0, "loss_agg_all_seqs": True},
        {"grpo": _TOKEN_MEAN},
        {"advantage_estimator": {"gae": _WHITENED, **_each(_GROUPS, _KL_FIRST), "grpo_passk": _KL_FIRST | _DIVIDED},
         "policy_loss": _each(("sapo", "gmpo"), _SEQ_MEAN)}),
    "trl": Semantics(
        "TRL 1.16",
        {"std_eps": 1e-4, "whiten_unbiased": True, "whiten_flat_groups": True, "cispo_absolute": True, "k3_max": 0.0,
         "loss_agg_all_seqs": True, "entropy_token_mean": True},
        {"grpo": _TOKEN_MEAN, "cispo": {"eps_clip_high": 5.0}},
        {"advantage_estimator": {"rloo": _KL_FIRST}, "policy_loss": {"sapo": _SEQ_MEAN}}),
    "openrlhf": Semantics(
        "OpenRLHF 0.11.2",
        {"std_eps": 1e-9, "whiten_flat_groups": True, "k3_max": 10.0, "entropy_token_mean": True},
        {"grpo": _TOKEN_MEAN},
        {"advantage_estimator": _each(("gae", "reinforce"), _WHITENED), "policy_loss": {"gspo": _SEQ_MEAN}}),
    "lightrft": Semantics(
        "LightRFT 0.1.1", {"std_eps": 1e-9, "k3_max": 0.0} | _SEQ_MEAN, _each(RECIPES, _SEQ_MEAN),
        {"advantage_estimator": {"cpgd": _DIVIDED}}),
}  # yapf: disable


class Meaning(NamedTuple):
    """Effect of one option, and the choices with which a preset sets it."""
    text: str
    given: Options = {}


def _for(estimator: str) -> Options:
    return {"advantage_estimator": estimator}


MEANINGS: dict[str, Meaning] = {
    "std_eps": Meaning("added to the standard deviation of a group"),
    "norm_group_std": Meaning("grpo_passk divides by that deviation (cpgd: only in LightRFT)", _for("grpo_passk")),
    "whiten_unbiased": Meaning("whitening with Bessel's correction (else the population's variance)"),
    "whiten_flat_groups": Meaning("reinforce_baseline and gdpo whiten groups without spread like the others (else 0)"),
    "gdpo_whiten_tokens": Meaning("gdpo whitens over tokens (else over samples)"),
    "advantages_norm": Meaning("advantages of gae are whitened", _for("gae")),
    "kl_in_outcome": Meaning("estimators that compare a group, such as rloo, see the KL of the reward (else it is "
                             "added to each token after the comparison)", _for("rloo")),
    "k3_max": Meaning("limit of the k3 estimate of one token (0: none)"),
    "loss_agg_mode": Meaning("mean of --recipe grpo", {"recipe": "grpo"}),
    "loss_agg_all_seqs": Meaning("means over sequences count those without a token in the loss"),
    "entropy_token_mean": Meaning("the entropy bonus is a mean over tokens (else it is aggregated as the loss is)"),
    "dual_clip": Meaning("dual clip in the PPO loss (verl's clip_ratio_c)"),
    "dppo_ratio_max": Meaning("largest weight of a token in dppo_tv and dppo_kl (verl's clip_ratio_c)"),
    "kl_cov_abs": Meaning("the penalty of kl_cov is the absolute log-ratio (else k3)"),
    "cispo_absolute": Meaning("--eps_clip_high of CISPO is the bound on the ratio itself (else its distance from 1)"),
    "eps_clip_high": Meaning("upper bound of --recipe cispo in these terms", {"recipe": "cispo"}),
}  # yapf: disable
