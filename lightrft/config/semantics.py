"""``--semantics NAME``: where one name means different mathematics in different trainers, the meaning it has in NAME.

Every difference is an option of its own and a preset only sets them, so a flag, a YAML key or a recipe still wins.
"""
from typing import Any, NamedTuple


class Semantics(NamedTuple):
    """What one trainer means: options, and those that differ from the recipe of a name that it uses as well."""
    options: dict[str, Any]
    recipes: dict[str, dict[str, Any]] = {}


_TOKEN_MEAN = {"loss_agg_mode": "token-mean"}

SEMANTICS: dict[str, Semantics] = {
    "lightrft": Semantics({}),
    "verl": Semantics({"whiten_unbiased": True, "loss_agg_norm_seqs": False, "dual_clip": 3.0}, {"grpo": _TOKEN_MEAN}),
    "trl": Semantics({"std_eps": 1e-4, "whiten_unbiased": True, "cispo_absolute": True},
                     {"grpo": _TOKEN_MEAN, "cispo": {"eps_clip_high": 5.0}}),
    "openrlhf": Semantics({"std_eps": 1e-9}, {"grpo": _TOKEN_MEAN}),
}  # yapf: disable

# what a name means here, and the option that says so
MEANINGS: dict[str, str] = {
    "std_eps": "added to the standard deviation of a group",
    "whiten_unbiased": "whitening with Bessel's correction (else the population's variance)",
    "loss_agg_norm_seqs": "Dr.GRPO's constant is multiplied by the number of sequences",
    "dual_clip": "dual clip in the PPO loss (verl's clip_ratio_c)",
    "loss_agg_mode": "mean of --recipe grpo",
    "cispo_absolute": "--eps_clip_high of CISPO is the bound on the ratio itself (else on its distance from 1)",
    "eps_clip_high": "upper bound of --recipe cispo in these terms",
}
