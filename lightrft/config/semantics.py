"""``--semantics NAME``: where one name means different mathematics in different trainers, the meaning it has in NAME.

Every difference is an option of its own; a preset only sets them, so a flag, a YAML key or a recipe still wins.
"""
from typing import Any, NamedTuple


class Semantics(NamedTuple):
    """What one trainer means."""
    options: dict[str, Any]
    grpo: dict[str, Any] = {}  # where its GRPO is not the paper's: wins over --recipe grpo


SEMANTICS: dict[str, Semantics] = {
    "lightrft": Semantics({}),
    "verl": Semantics({
        "whiten_unbiased": True, "loss_agg_norm_seqs": False, "dual_clip": 3.0
    }, {"loss_agg_mode": "token-mean"}),
    "trl": Semantics({"std_eps": 1e-4, "whiten_unbiased": True}, {"loss_agg_mode": "token-mean"}),
    "openrlhf": Semantics({"std_eps": 1e-9}, {"loss_agg_mode": "token-mean"}),
}  # yapf: disable
