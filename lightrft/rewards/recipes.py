"""Which reward parts, with which weights, a row gets without ``--reward``: by its label, else its data source."""
from lightrft.rewards.base import RewardInput
from lightrft.utils.errors import UserError

Recipe = list[tuple[str, float]]

_MATH_WITH_FORMAT: Recipe = [("math", 0.9), ("format", 0.1)]
_EXACT: Recipe = [("exact", 1.0)]
_MATH: Recipe = [("math", 1.0)]

RECIPES: dict[str, Recipe] = {
    "gsm8k_rule": _MATH_WITH_FORMAT,
    "openai/gsm8k": _MATH_WITH_FORMAT,
    "geo3k_rule": _MATH_WITH_FORMAT,
    "hiyouga/geometry3k": _MATH_WITH_FORMAT,
    "quickstart_rule": _EXACT,
    "lightrft/quickstart": _EXACT,
    "exact_rule": _EXACT,
    "format_rule": [("format", 1.0)],
    "math_rule": _MATH,
    "accuracy_rule": _MATH,
    "HuggingFaceH4/MATH-500": _MATH,
    "DigitalLearningGmbH/MATH-lighteval": _MATH,
}
"""Label or data source -> [(reward part, weight)]. Plugins may add entries."""


def recipe_for(item: RewardInput) -> Recipe:
    """The recipe of a row. ``ValueError`` naming the known ones when neither label nor data source has one."""
    for key in (item.label, item.data_source):
        if key in RECIPES:
            return RECIPES[key]
    raise UserError(f"no reward recipe for label {item.label!r} or data source {item.data_source!r}. Known recipes: "
                    f"{', '.join(sorted(RECIPES))}. Remedy: name the reward, for example --reward math or "
                    "--reward my_reward.py, or set the row's label to one of the known recipes")
