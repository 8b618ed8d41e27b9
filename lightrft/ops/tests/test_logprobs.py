"""The chunked log-probs and entropy equal log_softmax over the whole [N, V], forward and backward."""
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightrft.ops import logprobs
from lightrft.ops.logprobs import _Head, chunked_logprobs, read_logprobs


def naive(hidden, weight, targets, temperature=1.0, bias=None, soft_cap=0.0):
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    logits = soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits
    p = torch.log_softmax(logits / (temperature or 1.0), -1)
    return p.gather(-1, targets[:, None])[:, 0], -(p.exp() * p).sum(-1)


def problem(n=13, vocab=17, width=5, dtype=torch.float64, bias=True):
    gen = torch.Generator().manual_seed(n * vocab)
    hidden = torch.randn(n, width, generator=gen, dtype=dtype).mul_(2).requires_grad_()
    weight = torch.randn(vocab, width, generator=gen, dtype=dtype).requires_grad_()
    offset = torch.randn(vocab, generator=gen, dtype=dtype).requires_grad_() if bias else None
    return hidden, weight, torch.randint(vocab, (n, ), generator=gen), offset


def chunk_of(rows, vocab, buffers=2, itemsize=8):
    return (rows + 0.5) * vocab * buffers * itemsize / 2**20


@pytest.mark.parametrize("rows", [1, 4, 13, 1000])
@pytest.mark.parametrize("temperature,soft_cap,bias", [(1.0, 0.0, False), (0.7, 0.0, True), (0.0, 3.0, True),
                                                       (1.3, 3.0, False)])
def test_equals_naive(rows, temperature, soft_cap, bias):
    hidden, weight, targets, offset = problem(bias=bias)
    inputs = [x for x in (hidden, weight, offset) if x is not None]
    expected = naive(hidden, weight, targets, temperature, offset, soft_cap)
    chunk = chunk_of(rows, 17, 3 if soft_cap else 2)
    actual = chunked_logprobs(hidden, weight, targets, temperature, offset, chunk, True, soft_cap)
    upstream = torch.randn(2, 13, dtype=torch.float64)
    for pick in ([0], [1], [0, 1]):
        for got, want in zip(actual, expected):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        got, want = [
            torch.autograd.grad([o[i] for i in pick], inputs, [upstream[i] for i in pick], retain_graph=True)
            for o in (actual, expected)
        ]
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_gradcheck():
    hidden, weight, targets, bias = problem(5, 7, 3)
    torch.autograd.gradcheck(lambda h, w, b: chunked_logprobs(h, w, targets, 0.8, b, chunk_of(2, 7, 3), True, 5.0),
                             (hidden, weight, bias))


def test_without_entropy_and_without_gradients():
    hidden, weight, targets, _ = problem(bias=False)
    logprobs, entropy = chunked_logprobs(hidden, weight.detach(), targets, entropy=False)
    assert entropy is None
    logprobs.sum().backward()
    assert weight.grad is None and hidden.grad is not None, "a frozen head costs no gradient"
    frozen, _ = chunked_logprobs(hidden.detach(), weight.detach(), targets)
    assert not frozen.requires_grad
    torch.testing.assert_close(frozen, logprobs.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_summed_up_in_float32(dtype):
    """The logits are those of the half values in exact arithmetic: rounded logits would be off by 2^-9 of them."""
    hidden, weight, targets, _ = problem(64, 33, 16, torch.float32, bias=False)
    low_h, low_w = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().double().requires_grad_() for x in (low_h, low_w)]
    want = naive(*exact, targets, 0.9)
    got = chunked_logprobs(low_h, low_w, targets, 0.9, chunk_mib=chunk_of(5, 33, 2, 4))
    for a, b in zip(got, want):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(got[0].sum() + got[1].sum(), (low_h, low_w))
    for x, y in zip(grads, torch.autograd.grad(want[0].sum() + want[1].sum(), exact)):
        assert x.dtype == dtype
        torch.testing.assert_close(x.double(), y, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_sums_of_blocks_are_the_product(monkeypatch):
    """Of half precision on CUDA the gradient of the head is added up block by block; here with the kernel of a CPU."""
    monkeypatch.setattr(logprobs, "_BLOCK", 5)
    monkeypatch.setattr(logprobs, "_matmul", lambda left, right, out: out.copy_(left.float() @ right.float()))
    left, right = torch.randn(13, 4).bfloat16(), torch.randn(4, 3).bfloat16()
    total = torch.ones(13, 3)
    logprobs._add_matmul(total, left, right)
    torch.testing.assert_close(total, 1 + left.float() @ right.float())


def test_large_logits_and_empty_input():
    hidden, weight, targets, _ = problem(6, 9, 4, torch.float32, bias=False)
    logprobs, entropy = chunked_logprobs(hidden * 1e3, weight * 1e3, targets)
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropy).all()
    none, _ = chunked_logprobs(hidden[:0], weight, targets[:0])
    none.sum().backward()
    assert none.shape == (0, ) and not weight.grad.any()


def test_temporaries_stay_within_the_chunk():
    head = _Head(torch.zeros(1000, 4), None, 1.0, 0.0)
    assert head.rows(1) == 2**20 // (1000 * 8)
    assert _Head(torch.zeros(1000, 4), None, 1.0, 30.0).rows(1) == 2**20 // (1000 * 12)
    assert _Head(torch.zeros(1000, 4, dtype=torch.bfloat16), None, 1.0, 0.0).rows(1) == 2**20 // (1000 * 8)
    assert head.rows(0.001) == 1, "always at least one row"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_the_entropy_changes_no_log_prob(dtype, soft_cap, monkeypatch):
    """Chunks are the same, so the matmul rounds alike: it did not on CPUs where 1 to 3 rows take another kernel."""
    hidden, weight, targets = [x.detach() for x in problem(33, 64, 96, torch.float32, bias=False)[:3]]
    seen, matmul = [], _Head.logits
    monkeypatch.setattr(_Head, "logits", lambda head, part: seen.append(len(part)) or matmul(head, part))
    for rows in (1, 2, 3, 5, 8):
        chunk = chunk_of(rows, 64, 2 + bool(soft_cap), 4)
        plain, more = [
            chunked_logprobs(hidden.to(dtype), weight.to(dtype), targets, 0.7, None, chunk, entropy, soft_cap)[0]
            for entropy in (False, True)
        ]
        assert torch.equal(plain, more)
        assert seen[:len(seen) // 2] == seen[len(seen) // 2:] and seen[0] == rows
        seen.clear()


class RowSums(TorchDispatchMode):
    """Multiplies matrices like a GPU: the rounding of a row depends on how many rows there are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.mul_(1 + len(args[0]) * 2**-7) if func.overloadpacket is torch.ops.aten.mm else out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_that_depend_on_the_rows_change_no_ratio(dtype):
    """The pass before the update has no entropy and the update has one: both cut the same rows at any chunk size."""
    hidden, weight, targets = [x.detach() for x in problem(33, 64, 96, torch.float32, bias=False)[:3]]

    def logprobs(chunk_mib, entropy):
        with RowSums():
            return chunked_logprobs(hidden.to(dtype), weight.to(dtype), targets, 1.0, None, chunk_mib, entropy)[0]

    chunks = [chunk_of(rows, 64, 3, 4) for rows in (2, 3, 5, 7, 11)]
    pairs = [(logprobs(chunk, False), logprobs(chunk, True)) for chunk in chunks]
    assert all(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(pairs[0][0], pairs[-1][0]), "the emulation rounds other rows otherwise"


class Live(TorchDispatchMode):
    """Counts bytes of live [rows, V] tensors made under it."""

    def __init__(self, vocab):
        super().__init__()
        self.vocab, self.live, self.peak = vocab, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out, ):
            if isinstance(t, torch.Tensor) and t.dim() == 2 and t.shape[1] == self.vocab and len(t) > 8:
                self.live[t.untyped_storage().data_ptr()] = StorageWeakRef(t.untyped_storage())
        self.live = {k: ref for k, ref in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.bytes_of(ref) for ref in self.live.values()))
        return out

    @staticmethod
    def bytes_of(ref):
        storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
        return 0 if storage is None else storage.nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_measured_peak_is_the_chunk(dtype, entropy, soft_cap):
    hidden, weight, targets, _ = problem(400, 2003, 8, torch.float32, bias=False)
    hidden, weight = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
    with Live(2003) as live:
        logprobs, h = chunked_logprobs(hidden, weight, targets, chunk_mib=1, entropy=entropy, soft_cap=soft_cap)
        (logprobs.sum() + (h.sum() if entropy else 0)).backward()
    assert 0.2 * 2**20 < live.peak <= 2**20


def test_the_benchmark_shows_a_bounded_peak():
    """One row of benchmarks/logprob_memory.py: temporaries of 150 MiB and more naively, the chunk when chunked."""
    script = Path(__file__).parents[3] / "benchmarks" / "logprob_memory.py"
    flags = [
        "--tokens", "256", "--hidden", "16", "--chunk_mib", "8", "--vocabs", "50000", "--repeats", "1", "--device",
        "cpu"
    ]
    done = subprocess.run([sys.executable, str(script), *flags], capture_output=True, text=True, timeout=120,
                          check=True)
    row = [cell.strip() for cell in done.stdout.splitlines()[-1].strip("|").split("|")]
    assert row[0] == "50000" and float(row[1]) > 100 and float(row[2]) < 24


def best_two(logprobs, part):
    """A value that is not linear in the log-probs, one per token, and ids, which have no gradient."""
    values, ids = logprobs.topk(2)
    return (logprobs.exp() * logprobs).sum(-1), values, ids


@pytest.mark.parametrize("rows,soft_cap", [(4, 0.0), (1000, 3.0)])
def test_what_is_read_in_chunks_is_what_is_read_at_once(rows, soft_cap):
    hidden, weight, _, bias = problem()
    logits = hidden @ weight.t() + bias
    logits = soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits
    expected = best_two(logits[:, :11].log_softmax(-1), slice(0, 13))
    actual = read_logprobs(hidden, weight, best_two, 11, bias, chunk_of(rows, 17, 4), soft_cap)
    assert torch.equal(actual[2], expected[2]) and not actual[2].requires_grad
    upstream = [torch.randn_like(each) for each in expected[:2]]
    for pick in ([0], [0, 1]):
        got, want = (torch.autograd.grad([found[i]
                                          for i in pick], (hidden, weight, bias), [upstream[i]
                                                                                   for i in pick], retain_graph=True)
                     for found in (actual, expected))
        for a, b in zip((actual[0], *got), (expected[0], *want)):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    empty = read_logprobs(hidden[:0], weight, best_two, 11, bias, 1.0)
    assert [each.shape for each in empty] == [(0, ), (0, 2), (0, 2)]
    assert not torch.autograd.grad(empty[0].sum(), weight)[0].any(), "an empty micro-batch has a gradient of zeros"


def test_what_is_read_of_half_inputs_is_summed_up_in_float32():
    """Also the gradient of the weight, over all chunks; rounded logits would be off by 2^-9 of them."""
    halves = [each.detach().to(torch.bfloat16).requires_grad_() for each in problem(64, bias=False)[:2]]
    wholes = [each.detach().float().requires_grad_() for each in halves]

    def entropy(logprobs, part):
        return ((logprobs.exp() * logprobs).sum(-1), )

    (value, ), (expected, ) = (read_logprobs(*pair, entropy, chunk_mib=chunk_of(4, 17, 4, 4))
                               for pair in (halves, wholes))
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    for got, want in zip(torch.autograd.grad(value.sum(), halves), torch.autograd.grad(expected.sum(), wholes)):
        torch.testing.assert_close(got, want.to(torch.bfloat16), rtol=2**-7, atol=1e-5)
