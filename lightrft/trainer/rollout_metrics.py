"""Metrics of a rollout batch (all ranks)."""
from typing import Any

import torch

from lightrft.ops.segment import segment_sum
from lightrft.types import Experience


def response_metrics(exp: Experience, seconds: float) -> dict[str, float]:
    """``rollout/*``: counts of prompts, samples and generated tokens, speed, lengths, share that hit the length limit,
    and the mean of -log p over what was sampled, which estimates the entropy without a pass.

    To be called while ``loss_mask`` still covers every generated token.
    """
    lengths = segment_sum(exp.loss_mask.float(), exp.cu_seqlens)
    tokens = lengths.sum().item()
    return {
        "rollout/prompts": len(exp.group_ids.unique()),
        "rollout/samples": exp.num_seqs,
        "rollout/tokens": tokens,
        "rollout/tokens_per_s": tokens / max(seconds, 1e-9),
        "rollout/response_len/mean": lengths.mean().item(),
        "rollout/response_len/min": lengths.min().item(),
        "rollout/response_len/max": lengths.max().item(),
        "rollout/truncated_frac": exp.truncated.float().mean().item(),
        "rollout/entropy_estimate": -exp.rollout_logprobs[exp.loss_mask].mean().item(),
    }


def staleness_metrics(exp: Experience, step: int) -> dict[str, float]:
    """``rollout/stale*``: how many versions the weights of ``step`` are ahead of those that drew each token."""
    age = (step - exp.weight_versions[exp.weight_versions >= 0]).float()
    return {
        "rollout/staleness/mean": age.mean().item(),
        "rollout/staleness/max": age.max().item(),
        "rollout/stale_frac": (age > 0).float().mean().item(),
    }


def reward_metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """``reward/<part>/{mean,std}`` over the samples each part judged, and how many samples are unscored, by cause."""
    metrics: dict[str, float] = {"reward/unscored": sum(row["reward"] is None for row in rows)}
    for name in sorted({name for row in rows for name in row["parts"]}):
        values = torch.tensor([row["parts"][name] for row in rows if row["parts"].get(name) is not None])
        metrics[f"reward/{name}/mean"] = values.float().mean().item() if len(values) else 0.0
        metrics[f"reward/{name}/std"] = values.float().std(correction=0).item() if len(values) else 0.0
    for cause in sorted({row["error"] for row in rows if row["error"]}):
        metrics[f"reward/unscored/{cause}"] = sum(row["error"] == cause for row in rows)
    return metrics
