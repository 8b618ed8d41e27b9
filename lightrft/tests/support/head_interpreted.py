"""The kernels of ``--fused_logprobs``, which Triton's interpreter runs on a CPU, against float64 formulas.

For an environment with Triton; :mod:`lightrft.models.tests.test_liger` runs it there, with ``TRITON_INTERPRET=1``.
"""
import pytest
import torch
from torch import Tensor

from lightrft.ops import logits_kernels
from lightrft.ops.logprobs import chunked_logprobs


def naive(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [n] of logits [n, V], in float64; a logit of -inf has no part in the entropy."""
    log_p = (logits.double() / temperature).log_softmax(-1)
    held = torch.where(log_p.isinf(), 0.0, log_p.exp() * torch.where(log_p.isinf(), 0.0, log_p))
    return log_p.gather(-1, targets[:, None])[:, 0], -held.sum(-1)


def logits_of(kind: str, vocab: int) -> Tensor:
    rows = torch.randn(5, vocab) * 4
    if kind == "extreme":
        rows[0], rows[1, 0], rows[2] = 1e3, 3e3, -1e3  # all alike, one alone, far below zero
        rows[3, 1::2] = -float("inf")
        rows[4] = torch.linspace(-1e3, 1e3, vocab)
    return rows


@pytest.mark.parametrize("kind", ["usual", "extreme"])
@pytest.mark.parametrize("vocab, temperature", [(1, 1.0), (7, 0.7), (64, 1.0), (65, 1.3), (300, 1.0)])
def test_one_pass_reads_and_one_writes(kind, vocab, temperature, monkeypatch):
    """Vocabularies of one, of less than one, of one and of several blocks; all combinations of gradients."""
    monkeypatch.setattr(logits_kernels, "BLOCK", 64)
    torch.manual_seed(vocab)
    logits = logits_of(kind, vocab)
    targets = logits.argmax(-1).remainder(vocab) if kind == "extreme" else torch.randint(vocab, (5, ))
    wide = logits.double().requires_grad_()
    expected = naive(wide, targets, temperature)
    for entropies in (torch.empty(5), None):
        found, norms = torch.empty(5), torch.empty(5)
        logits_kernels.read(logits, targets, temperature, found, norms, entropies)
        torch.testing.assert_close(norms, (logits.double() / temperature).logsumexp(-1).float())
        for value, want in zip((found, entropies), expected):
            if value is not None:
                torch.testing.assert_close(value.double(), want.detach(), atol=2e-5, rtol=2e-6)
    logits_kernels.read(logits, targets, temperature, found, norms, entropies := torch.empty(5))
    grads = torch.randn(5), torch.randn(5)
    for pair in (grads, (grads[0], None), (None, grads[1])):
        loss = sum((value * grad.double()).sum() for value, grad in zip(expected, pair) if grad is not None)
        want, = torch.autograd.grad(loss, wide, retain_graph=True)
        for out in (torch.empty(logits.shape, dtype=torch.bfloat16), logits.clone()):
            got = logits_kernels.slope(logits, out, targets, temperature, norms, entropies, *pair)
            close = 1e-2 if out.dtype == torch.bfloat16 else 5e-4 if kind == "extreme" else 2e-5  # a sum of 1e3: 6e-5
            torch.testing.assert_close(got.double(), want.nan_to_num(0.0), atol=close, rtol=close)


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_function_gives_the_same_with_and_without_them(entropy, dtype, monkeypatch):
    """Over several ragged chunks."""
    monkeypatch.setattr(logits_kernels, "BLOCK", 64)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 16, dtype=dtype, requires_grad=True) for rows in (11, 130))
    targets, results = torch.randint(130, (11, )), []
    for fused in (False, True):
        values = chunked_logprobs(hidden, weight, targets, 0.8, chunk_mib=0.004, entropy=entropy, fused=fused)
        loss = sum(value.mul(torch.arange(11.)).sum() for value in values if value is not None)
        results.append([*(value for value in values if value is not None),
                        *torch.autograd.grad(loss, (hidden, weight))])  # yapf: disable
    for usual, one_pass in zip(*results, strict=True):
        torch.testing.assert_close(one_pass, usual, atol=1e-5, rtol=1e-5)
