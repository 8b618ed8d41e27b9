"""Losses on preferences, of policies (from log-probs of whole responses: pairs, and single ones for KTO) and of reward
models (Bradley-Terry on the scores of a pair, cross-entropy on the judgements of steps).

Every loss gives one number per pair, and the loss of a batch is their mean. Losses of policies take the options that
they read as parameters; :attr:`PairLoss.reads` is derived from their signatures.
"""
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from math import log, log1p
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from lightrft.utils.registry import Registry


class Pairs(NamedTuple):
    """Log-probs of P pairs, summed over the tokens of a response, and the number of these tokens; all [P]."""
    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor  # of the reference model; 0 for a loss without one
    ref_rejected: Tensor
    chosen_lens: Tensor
    rejected_lens: Tensor
    matched: Tensor | None = None  # of aot, where these are not all pairs of the batch: see :func:`match_by_rank`

    @property
    def chosen_ratio(self) -> Tensor:
        """``log pi(y_c) - log pi_ref(y_c)``."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """``log pi(y_r) - log pi_ref(y_r)``."""
        return self.rejected - self.ref_rejected

    @property
    def margin(self) -> Tensor:
        """Difference of the two log-ratios: the implicit reward margin of DPO, divided by beta."""
        return self.chosen_ratio - self.rejected_ratio

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """Log-probs per token of the chosen and of the rejected responses."""
        return self.chosen / self.chosen_lens, self.rejected / self.rejected_lens


@dataclass(frozen=True)
class PairLoss:
    """Registered loss of pairs; ``fn(pairs, **options) -> [P]``."""
    fn: Callable[..., Tensor]
    needs_smoothing: bool = False  # it is not defined at label_smoothing 0
    matches: bool = False  # it compares the pairs of the whole batch with each other
    averages: bool = False  # its log-ratios are per token

    def ratios(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return the log-ratios that it compares, of the chosen and of the rejected responses, [P] each; beta times
        these are implicit rewards."""
        found = pairs.chosen_ratio, pairs.rejected_ratio
        return (found[0] / pairs.chosen_lens, found[1] / pairs.rejected_lens) if self.averages else found

    @property
    def reads(self) -> tuple[str, ...]:
        """The options that it reads."""
        return tuple(inspect.signature(self.fn).parameters)[1:]


PAIR_LOSSES: Registry[PairLoss] = Registry("preference loss")


def ordered_rightly(margins: Tensor) -> Tensor:
    """Score of each pair from chosen minus rejected: 1 above 0, 1/2 at a tie, else 0; its mean is the accuracy.

    A tie is what a model says that cannot tell the two apart: as often right as a guess.
    """
    return (margins > 0).double() + 0.5 * (margins == 0).double()


def _pair_loss(name: str, **facts: bool) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:

    def add(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        PAIR_LOSSES.register(name)(PairLoss(fn, **facts))
        return fn

    return add


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy of labels that are wrong with probability ``label_smoothing``."""
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


@_pair_loss("sigmoid")
def sigmoid(pairs: Pairs, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """``-log sigmoid(beta * margin)``: DPO (arXiv:2305.18290, eq. 7); smoothed, conservative DPO
    (https://ericmitchell.ai/cdpo.pdf)."""
    return _smoothed(beta * pairs.margin, label_smoothing)


@_pair_loss("ipo_sum")
def ipo_sum(pairs: Pairs, beta: float) -> Tensor:
    """``(margin - 1 / (2 beta))**2`` of summed log-probs: IPO as printed (arXiv:2310.12036, eq. 17)."""
    return (pairs.margin - 1 / (2 * beta))**2


@_pair_loss("ipo_mean", averages=True)
def ipo_mean(pairs: Pairs, beta: float) -> Tensor:
    """``(margin - 1 / (2 beta))**2`` of log-probs per token: IPO with each response divided by its length, so that one
    beta suits short and long responses."""
    margin = pairs.chosen_ratio / pairs.chosen_lens - pairs.rejected_ratio / pairs.rejected_lens
    return (margin - 1 / (2 * beta))**2


@_pair_loss("hinge")
def hinge(pairs: Pairs, beta: float) -> Tensor:
    """``max(0, 1 - beta * margin)``: the calibration loss of SLiC-HF (arXiv:2305.10425) on the margin of DPO
    (RSO, arXiv:2309.06657)."""
    return torch.relu(1 - beta * pairs.margin)


@_pair_loss("robust")
def robust(pairs: Pairs, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO whose mean is unbiased when labels are flipped at a known rate below 1/2 (arXiv:2403.00409, eq. 12)."""
    right, wrong = -logsigmoid(beta * pairs.margin), -logsigmoid(-beta * pairs.margin)
    return ((1 - label_smoothing) * right - label_smoothing * wrong) / (1 - 2 * label_smoothing)


@_pair_loss("simpo", averages=True)
def simpo(pairs: Pairs, beta: float, label_smoothing: float = 0.0, simpo_gamma: float = 0.5) -> Tensor:
    """``-log sigmoid(beta * (mean_c - mean_r) - gamma)`` of log-probs per token: SimPO (arXiv:2405.14734, eq. 6)."""
    chosen, rejected = pairs.means
    return _smoothed(beta * (chosen - rejected) - simpo_gamma, label_smoothing)


@_pair_loss("orpo", averages=True)
def orpo(pairs: Pairs, beta: float) -> Tensor:
    """``-mean_c - beta * log sigmoid(log odds ratio)``: NLL per token of the chosen response and the odds ratio of both
    (arXiv:2403.07691, eq. 6 and 7; beta is its lambda)."""
    chosen, rejected = pairs.means
    log_odds = (chosen - _log1mexp(chosen)) - (rejected - _log1mexp(rejected))
    return -chosen - beta * logsigmoid(log_odds)


@_pair_loss("apo_zero")
def apo_zero(pairs: Pairs, beta: float) -> Tensor:
    """``1 - sigmoid(beta * ratio_c) + sigmoid(beta * ratio_r)``: chosen responses become likelier, rejected ones less
    so (arXiv:2408.06266, eq. 7)."""
    return 1 - torch.sigmoid(beta * pairs.chosen_ratio) + torch.sigmoid(beta * pairs.rejected_ratio)


@_pair_loss("apo_down")
def apo_down(pairs: Pairs, beta: float) -> Tensor:
    """``sigmoid(beta * ratio_c) + 1 - sigmoid(beta * margin)``: both become less likely, the rejected one more so
    (arXiv:2408.06266, eq. 8)."""
    return torch.sigmoid(beta * pairs.chosen_ratio) + 1 - torch.sigmoid(beta * pairs.margin)


@_pair_loss("sppo")
def sppo(pairs: Pairs, beta: float) -> Tensor:
    """``(ratio_c - 1 / (2 beta))**2 + (ratio_r + 1 / (2 beta))**2``: SPPO (arXiv:2405.00675, eq. 4.7) with win rates of
    1 and 0; beta is its 1 / eta."""
    return (pairs.chosen_ratio - 1 / (2 * beta))**2 + (pairs.rejected_ratio + 1 / (2 * beta))**2


@_pair_loss("aot", matches=True)
def aot(pairs: Pairs, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """DPO on sorted margins: the i-th smallest of the policy against the i-th smallest of the reference (the paired
    form of arXiv:2406.05882, with the logistic loss)."""
    margins, ref = pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected
    matched = match_by_rank(margins, ref) if pairs.matched is None else pairs.matched
    return _smoothed(beta * (margins - matched), label_smoothing)


@_pair_loss("exo", needs_smoothing=True)
def exo(pairs: Pairs, beta: float, label_smoothing: float) -> Tensor:
    """``KL(softmax(beta * ratios) || [1 - eps, eps])``: EXO on pairs (arXiv:2402.00856, eq. 16), eps > 0 the
    ``label_smoothing``."""
    wins, loses = logsigmoid(beta * pairs.margin), logsigmoid(-beta * pairs.margin)
    return wins.exp() * (wins - log1p(-label_smoothing)) + loses.exp() * (loses - log(label_smoothing))


def match_by_rank(values: Tensor, others: Tensor) -> Tensor:
    """``out[values.argsort()] = others.sort()``: for each of ``values`` [P] that one of ``others`` [P] with its rank.

    Equal values are ranked in their order. No gradient reaches ``values``.
    """
    order = values.detach().argsort(stable=True)
    return torch.empty_like(others).index_copy(0, order, others.sort().values)


def _log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` of log-probs; one that rounds to 0 counts as the next below."""
    return torch.log(-torch.expm1(x.clamp_max(-torch.finfo(x.dtype).eps)))


def kto(logprobs: Tensor, ref_logprobs: Tensor, desirable: Tensor, kl: Tensor | float, beta: float,
        desirable_weight: float = 1.0, undesirable_weight: float = 1.0) -> Tensor:
    """``w * (1 - sigmoid(+-beta * (ratio - kl)))``, + where desirable: KTO (arXiv:2402.01306, eq. 8), [N].

    Args:
        logprobs, ref_logprobs: [N], summed over the tokens of a response.
        desirable: [N] bool.
        kl: the reference point of the whole batch, without gradient; see :func:`kto_kl`.
        beta: how soon a gain or a loss saturates.
        desirable_weight, undesirable_weight: factors ``w``.
    """
    gain = logprobs - ref_logprobs - kl
    weights = torch.where(desirable, desirable_weight, undesirable_weight).to(gain)
    return weights * (1 - torch.sigmoid(beta * torch.where(desirable, gain, -gain)))


def kto_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``max(0, mean(logprobs - ref_logprobs))`` of mismatched pairs [N], a prompt and the response to another one: the
    estimate of KL(policy || reference) of arXiv:2402.01306, section 4.1. No gradient."""
    return (logprobs - ref_logprobs).detach().mean().clamp_min(0)


def token_mean_weights(lens: Tensor) -> Tensor:
    """Return ``lens / mean(lens)``, [N]: a mean over responses of values per token, weighted with these, is the mean
    over all tokens."""
    return lens / lens.double().mean()


REWARD_LOSSES = ("sigmoid", "logexp", "hps")  # of scalar reward models, see :func:`pair_loss`


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
        kind: one of :data:`REWARD_LOSSES`.
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
        raise ValueError(f"unknown loss {kind!r}; known: {', '.join(REWARD_LOSSES)}")
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
