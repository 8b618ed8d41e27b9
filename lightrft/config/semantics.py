"""``--semantics NAME``: where one name means different mathematics in different trainers, the meaning it has in NAME.

Every difference is an option of its own and a preset only sets them, so a flag, a YAML key or a recipe still wins. What
no option covers is listed, with its size, in ``docs/coming_from.md``; ``benchmarks/oracles.py`` compares the presets
with the trainers themselves.
"""
from collections.abc import Iterable
from typing import Any, NamedTuple

from lightrft.config.recipes import RECIPES

Options = dict[str, Any]


class Semantics(NamedTuple):
    """What one trainer means."""
    version: str  # of the trainer; empty for this one
    options: Options
    recipes: dict[str, Options] = {}  # what differs from the recipe of a name that the trainer uses as well
    chosen: dict[str, dict[str, Options]] = {}  # option -> its value -> what that choice sets as well

    def values(self, choices: Options) -> Options:
        """The options it sets beside the ``choices`` made so far."""
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
         "dppo_ratio_max": 3.0, "kl_cov_abs": True, "k3_max": 10.0},
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
        "OpenRLHF 0.11.2", {"std_eps": 1e-9, "whiten_flat_groups": True, "k3_max": 10.0}, {"grpo": _TOKEN_MEAN},
        {"advantage_estimator": _each(("gae", "reinforce"), _WHITENED), "policy_loss": {"gspo": _SEQ_MEAN}}),
    "lightrft": Semantics(
        "LightRFT 0.1.1", {"std_eps": 1e-9, "k3_max": 0.0} | _SEQ_MEAN, _each(RECIPES, _SEQ_MEAN),
        {"advantage_estimator": {"cpgd": _DIVIDED}}),
}  # yapf: disable


class Meaning(NamedTuple):
    """What one option decides, and choices beside which a preset sets it."""
    text: str
    beside: Options = {}


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
