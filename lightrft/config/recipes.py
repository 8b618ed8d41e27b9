"""``--recipe NAME``: the options that a paper's method consists of, set at once; YAML keys and flags win.

A recipe holds method, not size: batch sizes, lengths and learning rates stay the run's own.
"""
from typing import Any, NamedTuple

_CLIP: dict[str, Any] = {"policy_loss": "ppo", "eps_clip": 0.2, "eps_clip_high": None}
_NO_KL: dict[str, Any] = {"init_kl_coef": 0.0}
_REWARD_KL: dict[str, Any] = {"use_kl_loss": False, "kl_estimator": "k1"}


class Recipe(NamedTuple):
    """One method."""
    paper: str
    summary: str
    options: dict[str, Any]


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe(
        "https://arxiv.org/abs/2402.03300", "group-standardised rewards, mean per response, KL to the reference in the "
        "loss (coefficient of section 4.2)", {
            "advantage_estimator": "group_norm", **_CLIP, "loss_agg_mode": "seq-mean-token-mean", "init_kl_coef": 0.04,
            "use_kl_loss": True, "kl_estimator": "k3"
        }),
    "dr_grpo": Recipe(
        "https://arxiv.org/abs/2503.20783", "no division by the spread of the group, none by the response's length",
        {"advantage_estimator": "dr_grpo", **_CLIP, "loss_agg_mode": "seq-mean-token-sum-norm", **_NO_KL}),
    "reinforce++": Recipe(
        "https://arxiv.org/abs/2501.03262", "returns whitened over the batch, KL per token in the reward",
        {"advantage_estimator": "reinforce++", **_CLIP, "loss_agg_mode": "token-mean", "init_kl_coef": 0.01,
         **_REWARD_KL}),
    "reinforce_baseline": Recipe(
        "https://arxiv.org/abs/2501.03262", "reward minus its group's mean, whitened over the batch, k2 KL in the loss",
        {"advantage_estimator": "reinforce_baseline", **_CLIP, "loss_agg_mode": "token-mean", "init_kl_coef": 0.001,
         "use_kl_loss": True, "kl_estimator": "k2"}),
    "ppo": Recipe(
        "https://arxiv.org/abs/1707.06347", "a critic, generalised advantages whitened over the batch, both clipped",
        {"advantage_estimator": "gae", **_CLIP, "loss_agg_mode": "token-mean", "value_clip": 0.2, "gamma": 1.0,
         "lambd": 0.95, "advantages_norm": True, **_NO_KL}),
}  # yapf: disable
