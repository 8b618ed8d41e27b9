"""Losses of reward models: Bradley-Terry on the scores of a pair, cross-entropy on the judgements of steps."""
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

LOSSES = ("sigmoid", "logexp", "hps")


def pair_loss(chosen: Tensor, rejected: Tensor, labels: Tensor, margins: Tensor | float = 0.0,
              kind: str = "sigmoid") -> Tensor:
    """Return ``p * l(c - r - margin) + (1 - p) * l(r - c - margin)``, [P], with ``l(d) = -log sigmoid(d)``.

    Bradley & Terry 1952; with a margin: Llama 2 (arXiv:2307.09288, eq. 2). The margin of "logexp", as in InstructGPT
    (arXiv:2203.02155, eq. 1), and of "hps" (arXiv:2306.09341, eq. 1) is 0. A tie has p = 1/2 and no margin: its loss is
    least where both scores are equal.

    Args:
        chosen, rejected: scores [P], or [P, K] of several heads.
        labels: probability p that the chosen answer is better; NaN gives a loss of 0.
        margins: read by "sigmoid".
        kind: one of :data:`LOSSES`.
    """
    known = ~labels.isnan()
    p, gap = torch.where(known, labels, 0.5), chosen - rejected
    if kind == "sigmoid":
        margins = torch.where(p == 0.5, 0.0, margins)
        loss = -p * logsigmoid(gap - margins) - (1 - p) * logsigmoid(-gap - margins)
    elif kind == "logexp":
        loss = p * softplus(-gap) + (1 - p) * softplus(gap)
    elif kind == "hps":
        logits = torch.stack([chosen, rejected], -1).log_softmax(-1)
        loss = -p * logits[..., 0] - (1 - p) * logits[..., 1]
    else:
        raise ValueError(f"unknown loss {kind!r}; known: {', '.join(LOSSES)}")
    return torch.where(known, loss, 0.0)


def step_loss(logprobs: Tensor, labels: Tensor, graded: bool) -> Tensor:
    """Return the cross-entropy of each step, [N].

    Math-Shepherd (arXiv:2312.08935, eq. 2): ``-p * l[0] - (1 - p) * l[1]`` with log-probs l and a ``graded`` label p,
    and ``-l[label]`` otherwise.

    Args:
        logprobs: of the classes, [N, K].
        labels: [N], probability of the first of two classes if ``graded``, else numbers of classes.
    """
    if graded:
        return -labels * logprobs[:, 0] - (1 - labels) * logprobs[:, 1]
    return -logprobs.gather(-1, labels.long()[:, None])[:, 0]
