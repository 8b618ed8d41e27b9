"""``--recipe NAME``: the options that a paper's method consists of, set at once; YAML keys and flags win.

A recipe holds method, not size: batch sizes, lengths and learning rates stay the run's own. Where a paper leaves a
coefficient open or fits it to its reward model, the number is ours.
"""
from typing import Any, NamedTuple

_NO_KL: dict[str, Any] = {"init_kl_coef": 0.0, "use_kl_loss": False, "kl_estimator": "k3"}
_REWARD_KL: dict[str, Any] = {"init_kl_coef": 0.01, "use_kl_loss": False, "kl_estimator": "k1"}


class Recipe(NamedTuple):
    """One method."""
    paper: str
    summary: str
    options: dict[str, Any]


def _arxiv(number: str) -> str:
    return f"https://arxiv.org/abs/{number}"


def _clipped(estimator: str, loss: str, low: float, high: float | None, aggregation: str,
             **more: Any) -> dict[str, Any]:
    """A loss with bounds on the ratio."""
    return {"advantage_estimator": estimator, "policy_loss": loss, "eps_clip": low, "eps_clip_high": high,
            "loss_agg_mode": aggregation, **more}  # yapf: disable


def _plain(estimator: str, aggregation: str, **more: Any) -> dict[str, Any]:
    """The policy gradient without a ratio."""
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
