"""The kernel of ``--fused_decode``, which Triton's interpreter runs on a CPU, against a loop over tokens in float64.

For an environment with Triton; :mod:`lightrft.models.tests.test_liger` runs it there, with ``TRITON_INTERPRET=1``.
"""
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from lightrft.rollout.engine import SamplingParams
from lightrft.rollout.hf import attention_kernel
from lightrft.rollout.hf.engine import HFEngine
from lightrft.tests.support import naive_decode, tiny
from lightrft.tests.support.episodes import Group, generate

HEADS, PROMPTS, ROWS = 2, 3, 5
SLOTS, LENGTHS, NEWEST = [2, 0, -1, 2, 1], [9, 17, 0, 9, 1], [0, 20, 0, 7, 16]  # a free row; a prompt of two rows


def product(self, left, right, *others, dot=InterpreterBuilder.create_dot):
    """Multiply numbers in bfloat16, which the interpreter has as their bits and multiplies as integers."""
    return dot(self, *(self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (left, right)), *others)


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("dim, queries, window, softcap", [(8, 1, None, None), (16, 2, 5, None), (20, 7, 18, 3.0),
                                                           (64, 17, None, 50.0)])
def test_a_row_attends_to_its_prompt_and_to_itself(dim, queries, window, softcap, dtype, limit, monkeypatch):
    """Tokens that do not exist are not read: they are not numbers."""
    monkeypatch.setattr(attention_kernel, "BLOCK", 16)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", product)
    torch.manual_seed(dim)
    prompts, rows = (torch.randn(2, count, HEADS, 24, dim, dtype=dtype) for count in (PROMPTS, ROWS))
    packed = torch.randn(ROWS * HEADS, queries + 2, dim, dtype=dtype)
    for i in range(ROWS):
        rows[:, i, :, NEWEST[i] + 1:] = torch.nan
        prompts[:, SLOTS[i], :, LENGTHS[i] or 24:] = torch.nan  # a free row has none
    numbers = [torch.tensor(x) for x in (SLOTS, LENGTHS, NEWEST)]
    out = attention_kernel.attend(packed[:, :-2], prompts, rows, *numbers, 0.4, window, softcap)
    expected = naive_decode.attend(packed[:, :-2].double(), prompts, rows, *numbers, 0.4, window, softcap)
    torch.testing.assert_close(out.double(), expected, atol=limit, rtol=limit)


@pytest.mark.parametrize("family, fused", [("qwen2", True), ("gemma2", False)])
def test_responses_are_those_of_products(family, fused):
    """Of fused and of other layers, with a window and a soft cap, prompts that samples share, and rows that move."""
    model = tiny.model(family, initializer_range=0.3, attn_implementation="packed")
    requests = [Group([5 + i] * (3 + 3 * i), [10 * i, 10 * i + 1]) for i in range(3)]
    responses = []
    for one_kernel in (False, True):
        engine = HFEngine(model, range(100, 130), 1 << 22, max_seqs=3, one_kernel=one_kernel)
        engine.fuses = fused
        groups = generate(engine, requests, SamplingParams(max_new_tokens=5))
        responses.append([completion for group in groups for completion in group])
    assert len({len(completion.token_ids) for completion in responses[0]}) > 1
    for plain, one in zip(*responses, strict=True):
        assert plain.token_ids == one.token_ids
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(plain.logprobs), atol=1e-4, rtol=1e-4)
