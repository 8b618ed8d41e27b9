import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightrft.models import attention
from lightrft.models.attention import PackedLayout, packed_attention
from lightrft.ops.segment import position_ids
from lightrft.tests.support import naive_model, tiny

MODULE = SimpleNamespace(layer_idx=3)
SHAPES = {
    "short": [20, 33, 7, 33, 1, 64], "long": [65, 80, 300], "mixed": [70, 3, 16, 200, 17, 40, 66], "one": [9], "gaps":
    [0, 5, 0, 70, 0]
}


def qkv(lens: list[int], heads: int = 4, kv_heads: int = 2, dim: int = 16, dtype=torch.float32,
        device="cpu") -> list[Tensor]:
    torch.manual_seed(len(lens))
    shape = [(1, sum(lens), h, dim) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, dtype=dtype, device=device).transpose(1, 2).requires_grad_() for s in shape]


def loop(query: Tensor, key: Tensor, value: Tensor, lens: list[int], window: int | None = None,
         softcap: float | None = None, scaling: float = 0.3) -> Tensor:
    """Softmax attention written out, one sequence at a time, in float64."""
    outs = []
    for q, k, v in zip(*(x.double().split(lens, 2) for x in (query, key, value))):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * scaling
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        see = (back >= 0) & (back < (window or len(back) + 1))
        outs.append(scores.masked_fill(~see.to(scores.device), -torch.inf).softmax(-1) @ v)
    return torch.cat(outs, 2).transpose(1, 2)


@pytest.mark.parametrize("options", [{}, {"window": 8}, {"softcap": 5.0}, {"window": 8, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("lens", SHAPES.values(), ids=SHAPES)
def test_equals_a_loop_forward_and_backward(lens, options):
    inputs = qkv(lens)
    layout = PackedLayout.build(torch.tensor([0, *lens]).cumsum(0))
    out, _ = packed_attention(MODULE, *inputs, None, scaling=0.3, packing=layout, sliding_window=options.get("window"),
                              softcap=options.get("softcap"))
    expected = loop(*inputs, lens, **options)
    assert out.shape == (1, sum(lens), 4, 16) and layout.calls == 1
    torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=0)
    weight = torch.randn_like(out)
    for got, want in zip(torch.autograd.grad((out * weight).sum(), inputs),
                         torch.autograd.grad((expected * weight).sum(), inputs)):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_long_sequences_are_exactly_those_alone():
    lens = SHAPES["long"]
    inputs = qkv(lens)
    packed = packed_attention(MODULE, *inputs, None, packing=PackedLayout.build(torch.tensor([0, *lens]).cumsum(0)))[0]
    parts = [
        packed_attention(MODULE, *part, None, packing=PackedLayout.build(torch.tensor([0, n])))[0]
        for n, part in zip(lens, zip(*(x.split(lens, 2) for x in inputs)))
    ]
    assert torch.equal(packed, torch.cat(parts, 1))


def test_padded_rows_have_few_widths():
    layout = PackedLayout.build(torch.tensor([0] + [20 + i % 21 for i in range(128)]).cumsum(0))
    rows = layout._rows
    assert [(group.queries, group.keys) for group in rows.groups] == [(32, 32), (48, 48)]
    assert sum(group.rows for group in rows.groups) == 128
    assert torch.equal(rows.queries.index[rows.out.index], torch.arange(sum(layout.lens)))


SHARED = {  # lengths and what each sequence continues
    "short": ([17, 3, 30, 1, 9, 20, 12], [-1, 0, 0, 0, -1, -1, 5]),
    "long": ([70, 5, 90, 40, 300, 200, 10], [-1, 0, 0, 0, -1, 4, 4]),
    "mixed": ([33, 8, 8, 8, 40, 5, 60, 7], [-1, 0, 0, 0, -1, -1, 5, 5]),
    "gaps": ([20, 0, 5, 0, 30], [-1, 0, 0, -1, -1]),
}  # yapf: disable


def whole(lens: list[int], before: list[int]) -> tuple[Tensor, list[int], Tensor]:
    """Tokens of the row that each sequence sees, with its prefix copied; their numbers; which are its own."""
    tokens = torch.arange(sum(lens)).split(lens)
    parts = [[*([tokens[head]] if head >= 0 else []), own] for own, head in zip(tokens, before)]
    own = [torch.arange(n + (lens[head] if head >= 0 else 0)) >= (lens[head] if head >= 0 else 0)
           for n, head in zip(lens, before)]  # yapf: disable
    return torch.cat(sum(parts, [])), [sum(map(len, part)) for part in parts], torch.cat(own)


@pytest.mark.parametrize("options", [{}, {"window": 8}, {"softcap": 5.0}, {"window": 8, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("case", SHARED.values(), ids=SHARED)
def test_a_prefix_is_seen_by_all_that_continue_it(case, options):
    """As with a copy of it before each of them; gradients of the copies add up."""
    lens, before = case
    inputs, (tokens, copied, own) = qkv(lens), whole(*case)
    layout = PackedLayout.build(torch.tensor([0, *lens]).cumsum(0), before=before)
    out, _ = packed_attention(MODULE, *inputs, None, scaling=0.3, packing=layout, sliding_window=options.get("window"),
                              softcap=options.get("softcap"))
    expected = loop(*(x[:, :, tokens] for x in inputs), copied, **options)[:, own]
    torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=0)
    weight = torch.randn_like(out)
    for got, want in zip(torch.autograd.grad((out * weight).sum(), inputs),
                         torch.autograd.grad((expected * weight).sum(), inputs)):
        torch.testing.assert_close(got, want, atol=3e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 6])
def test_tokens_of_a_block_see_each_other(window):
    """In its sequence alone, as far as the window reaches back; long, short and plain sequences in one row."""
    lens, generator = [80, 9, 30, 70], torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, sum(lens), 8, generator=generator) for _ in range(3))
    layout = PackedLayout.build(torch.tensor([0, *lens]).cumsum(0))
    ids = [torch.full((n, ), -1) for n in lens]
    ids[0][10:30], ids[0][30:35], ids[2][:8] = 1, 2, 1
    layout.blocks = torch.cat(ids)
    found = packed_attention(MODULE, query, key, value, None, sliding_window=window, packing=layout)[0][0]
    for part, block, *qkv in zip(found.split(lens), ids, *(x[0].split(lens, 1) for x in (query, key, value))):
        for i, row in enumerate(part):
            seen = [j for j in range(len(block)) if (j <= i or block[i] >= 0 and block[i] == block[j])
                    and (window is None or i - j < window)]  # yapf: disable
            q, k, v = qkv[0][:, i:i + 1], qkv[1][:, seen], qkv[2][:, seen]
            expected = (q @ k.mT * 8**-0.5).softmax(-1) @ v
            torch.testing.assert_close(row, expected[:, 0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_packed_is_alone_and_the_silent_mistakes_are_not(family):
    exp = naive_model.experience()
    alone = tiny.model(family)
    alone.set_attn_implementation("eager")
    packed = tiny.model(family)
    packed.set_attn_implementation("packed")
    row = {"input_ids": exp.token_ids[None], "use_cache": False}
    positions = position_ids(exp.cu_seqlens)[None]
    with torch.no_grad():
        expected = naive_model.logits_alone(alone, exp)
        good = packed(**row, position_ids=positions, packing=PackedLayout.build(exp.cu_seqlens)).logits[0]
        no_positions = packed(**row, packing=PackedLayout.build(exp.cu_seqlens)).logits[0]
        ones = alone(**row, position_ids=positions, attention_mask=torch.ones_like(positions)).logits[0]
    assert (good - expected).abs().max() < 2e-5
    assert (no_positions -
            expected).abs().max() < 1e-4, "rotary positions are relative: an offset per sequence is harmless"
    assert (ones - expected).abs().max() > 0.1
    wrong_positions = positions.flip(1)
    with torch.no_grad():
        wrong = packed(**row, position_ids=wrong_positions, packing=PackedLayout.build(exp.cu_seqlens)).logits[0]
    assert (wrong - expected).abs().max() > 0.1


def test_the_cache_of_an_engine_takes_over():

    class Cache:

        def attend(self, *args, **kwargs):
            self.seen = args, kwargs
            return torch.zeros(1, 5, 4, 16)

    cache, inputs = Cache(), qkv([5])
    out, _ = packed_attention(MODULE, *inputs, None, scaling=0.5, sliding_window=7, kv_cache=cache)
    assert out.shape == (1, 5, 4, 16) and cache.seen == ((3, *inputs, 0.5, 7), {})
    packed_attention(MODULE, *inputs, None, kv_cache=cache, softcap=2.0)
    assert cache.seen[1] == {"softcap": 2.0}


@pytest.mark.parametrize("kwargs, message", [
    ({"attention_mask": torch.ones(1)}, "attention mask"),
    ({"s_aux": torch.ones(1)}, "attention sinks"),
    ({"position_bias": torch.ones(1)}, "position bias"),
    ({"dropout": 0.1}, "no dropout"),
    ({"packing": None}, "set_attn_implementation"),
    ({"packing": PackedLayout.build(torch.tensor([0, 4]))}, "one row of 4 tokens"),
])
def test_what_it_cannot_do_is_refused(kwargs, message):
    options = {"attention_mask": None, "packing": PackedLayout.build(torch.tensor([0, 5]))} | kwargs
    with pytest.raises(ValueError, match=message):
        packed_attention(MODULE, *qkv([5]), **options)


@pytest.mark.parametrize("known", [("scale", "window_size", "enable_gqa"), ("scale", "window_size"),
                                   ("scale", "is_causal"), ("is_causal", )], ids=str)
def test_every_signature_of_varlen_attn_gives_the_same(monkeypatch, known):
    lens = SHAPES["mixed"]
    inputs = [x[0].transpose(0, 1) for x in qkv(lens)]

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, **kwargs):
        assert set(kwargs) <= set(known) and (max_q, cu_q.dtype) == (200, torch.int32)
        assert kwargs.get("is_causal") or kwargs["window_size"][1] == 0
        assert k.shape[1] == (2 if kwargs.get("enable_gqa") else 4)
        window = kwargs.get("window_size", (-1, 0))[0] + 1
        back = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return loop(*back, lens, window=window or None, scaling=kwargs.get("scale", q.shape[-1]**-0.5))[0].to(q.dtype)

    monkeypatch.setattr(attention, "varlen_kernel", lambda: (kernel, frozenset(known)))
    layout = PackedLayout.build(torch.tensor([0, *lens]).cumsum(0))
    for window in (None, 8):
        out = attention._attend_varlen(*inputs, layout, 0.3, window)
        if window and "window_size" not in known:
            assert out is None
        else:
            torch.testing.assert_close(out, attention._attend_rows(*inputs, layout, 0.3, window, None), atol=3e-6,
                                       rtol=0)


@pytest.mark.parametrize("kind", ["grouped", "refuses", "wrong heads", "no gradient"])
def test_heads_are_repeated_unless_the_kernel_takes_them(monkeypatch, kind):
    """Of a release without an option for them, the kernel itself is asked, once: by results and gradients."""
    heads = []

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, window_size, scale=None):
        heads.append(k.shape[1])
        if kind == "refuses" and k.shape[1] != q.shape[1]:
            raise ValueError("Expect query and key/value to have the same number of heads")
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat(1, repeats, 1) if kind == "wrong heads" else x.repeat_interleave(repeats, 1) for x in (k, v))
        k = k.detach() if kind == "no gradient" and repeats > 1 else k
        back = [x.transpose(0, 1)[None] for x in (q, k, v)]
        return loop(*back, cu_q.diff().tolist(), scaling=scale or q.shape[-1]**-0.5)[0].to(q.dtype)

    lens = [5, 9]
    inputs = [x[0].transpose(0, 1) for x in qkv(lens)]
    layout = PackedLayout.build(torch.tensor([0, 5, 14]))
    monkeypatch.setattr(attention, "varlen_kernel", lambda: (kernel, frozenset(("scale", "window_size"))))
    outs = [attention._attend_varlen(*inputs, layout, None, None) for _ in range(2)]
    assert heads[-2:] == ([2, 2] if kind == "grouped" else [4, 4]) and len(heads) <= 2 + 2
    for out in outs:
        torch.testing.assert_close(out, attention._attend_rows(*inputs, layout, None, None, None), atol=3e-6, rtol=0)


@pytest.mark.parametrize("case", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("flash", [True, False])
def test_kernels_get_the_keys_of_prefixes(monkeypatch, flash, window, case):
    """flash-attn and torch's kernel align the causal mask, and the window, to the last query and the last key."""

    def kernel(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=None, scale=None, **kwargs):
        assert {cu_q.dtype, cu_k.dtype} == {torch.int32} and kwargs["window_size"][0] == (window or 0) - 1
        assert kwargs.get("causal") or kwargs["window_size"][1] == 0
        assert (max_q, max_k) == (cu_q.diff().max(), cu_k.diff().max()) and k.shape[1] == 2
        outs = []
        for one in zip(q.split(cu_q.diff().tolist()), *(x.split(cu_k.diff().tolist()) for x in (k, v))):
            queries, keys = len(one[0]), len(one[1])
            missing = torch.zeros(keys - queries, *q.shape[1:])
            rows = [x.transpose(0, 1)[None] for x in (torch.cat([missing, one[0]]), *one[1:])]
            outs.append(loop(*rows, [keys], window, scaling=scale or softmax_scale)[0][keys - queries:])
        return torch.cat(outs).to(q.dtype)

    monkeypatch.setattr(attention, "flash_kernel", lambda: kernel if flash else None)
    monkeypatch.setattr(attention, "varlen_kernel", lambda: (kernel, frozenset(("scale", "window_size", "enable_gqa"))))
    monkeypatch.setattr(attention, "HALF", (torch.float32, ))
    lens, before = case
    inputs = [x[0].transpose(0, 1) for x in qkv(lens)]
    layout = PackedLayout.build(torch.tensor([0, *lens]).cumsum(0), before=before)
    out = attention._attend_cuda(*inputs, layout, 0.3, window, None)
    expected = attention._attend_rows(*inputs, layout, 0.3, window, None)
    torch.testing.assert_close(out, expected, atol=3e-6, rtol=0)
    for got, want in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
        torch.testing.assert_close(got, want, atol=3e-5, rtol=0)


BROKEN = {
    "a namespace package": {"cute/interface.py": ""},  # what flash-attn-4 leaves
    "a wheel for another torch": {"__init__.py": "raise ImportError('flash_attn_2_cuda.so: undefined symbol')"},
    "an operator that torch has already": {"__init__.py": "raise RuntimeError('flash_attn::fwd is registered')"},
    "a Triton without what it uses": {"__init__.py": "import math; math.autotune"},
    "a Triton that calls it otherwise": {"__init__.py": "import math; math.sqrt(1, restore_value=None)"},
    "a library that cannot be loaded": {"__init__.py": "import ctypes; ctypes.CDLL('/no/libcudart.so')"},
}  # yapf: disable


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Installs files as the package flash_attn."""

    def install(files):
        for name, text in files.items():
            path = tmp_path / "flash_attn" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    attention.flash_kernel.cache_clear()
    yield install
    attention.flash_kernel.cache_clear()
    sys.modules.pop("flash_attn", None)


@pytest.mark.parametrize("name", BROKEN)
def test_a_flash_attn_that_cannot_be_imported_is_not_used(name, installed, monkeypatch, capsys):
    installed(BROKEN[name])
    assert importlib.util.find_spec("flash_attn") is not None
    monkeypatch.setattr(attention, "_attend_varlen", lambda *args: "varlen")
    rows = [x[0].transpose(0, 1) for x in qkv([5], dtype=torch.bfloat16)]
    layout = PackedLayout.build(torch.tensor([0, 5]))
    assert [attention._attend_cuda(*rows, layout, None, None, None) for _ in range(2)] == ["varlen", "varlen"]
    reported = [line for line in capsys.readouterr().err.splitlines() if "flash_attn" in line]
    assert len(reported) == 1 and "WARNING" in reported[0] and "torch's varlen kernel" in reported[0]


def test_a_flash_attn_that_works_is_used(installed, capsys):
    installed({"__init__.py": "def flash_attn_varlen_func(*args, **kwargs): return 'flash'"})
    rows = [x[0].transpose(0, 1) for x in qkv([5], dtype=torch.bfloat16)]
    layout = PackedLayout.build(torch.tensor([0, 5]))
    assert attention._attend_cuda(*rows, layout, None, None, None) == "flash"
    assert not capsys.readouterr().err


def test_torch_has_the_kernel_with_known_parameters():
    kernel, known = attention.varlen_kernel()
    assert kernel is not None and {"scale"} <= known and known & {"window_size", "is_causal"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("case", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_prefixes_on_cuda_equal_a_loop(dtype, tolerance, window, case):
    lens, before = case
    inputs, (tokens, copied, own) = qkv(lens, dim=32, dtype=dtype, device="cuda"), whole(*case)
    layout = PackedLayout.build(torch.tensor([0, *lens], device="cuda").cumsum(0), before=before)
    out, _ = packed_attention(MODULE, *inputs, None, scaling=0.3, packing=layout, sliding_window=window)
    expected = loop(*(x[:, :, tokens] for x in inputs), copied, window)[:, own]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)
    for got, want in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
        torch.testing.assert_close(got.double(), want.double(), atol=20 * tolerance, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_cuda_equals_a_loop(dtype, tolerance, window):
    lens = SHAPES["mixed"]
    inputs = qkv(lens, dim=32, dtype=dtype, device="cuda")
    layout = PackedLayout.build(torch.tensor([0, *lens], device="cuda").cumsum(0))
    out, _ = packed_attention(MODULE, *inputs, None, scaling=0.3, packing=layout, sliding_window=window)
    expected = loop(*inputs, lens, window)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)
    for got, want in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
        torch.testing.assert_close(got.double(), want.double(), atol=10 * tolerance, rtol=0)
