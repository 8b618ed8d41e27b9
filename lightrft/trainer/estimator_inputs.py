"""What some advantage estimators read beside the reward: the reward's parts, and the greedy response's reward."""
from typing import Any

import torch
from torch import Tensor

from lightrft.algorithms.base import Advantage
from lightrft.types import Experience


def fill_inputs(exp: Experience, rows: list[dict[str, Any]], estimator: Advantage) -> dict[str, float]:
    """Fill the fields that ``estimator`` needs, not shaped yet, from the rows of ``exp``; returns their metrics."""
    if estimator.needs_parts:
        exp.reward_parts, exp.part_weights = part_columns(rows)
    return _fill_baseline(exp, rows) if estimator.needs_greedy else {}


def part_columns(rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Values (NaN where a part does not judge the sample) and weights [B, K] of all parts, by name."""
    names = sorted({name for row in rows for name in row["weights"]})
    values = [[_number(row["parts"].get(name)) for name in names] for row in rows]
    weights = [[row["weights"].get(name, 0.0) for name in names] for row in rows]
    return torch.tensor(values, dtype=torch.float32), torch.tensor(weights, dtype=torch.float32)


def _number(value: float | None) -> float:
    return torch.nan if value is None else value


def _fill_baseline(exp: Experience, rows: list[dict[str, Any]]) -> dict[str, float]:
    exp.baseline_rewards = torch.tensor([_number(row.get("greedy_reward")) for row in rows], dtype=torch.float32)
    exp.baseline_lengths = torch.tensor([row.get("greedy_length", 0) for row in rows], dtype=torch.float32)
    of_prompts = {row["group_id"]: row.get("greedy_reward") for row in rows}
    known = [reward for reward in of_prompts.values() if reward is not None]
    return {
        "reward/greedy_mean": sum(known) / max(len(known), 1), "reward/greedy_unscored": len(of_prompts) - len(known)
    }
