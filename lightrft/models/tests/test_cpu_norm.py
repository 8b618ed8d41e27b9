"""RMSNorm with a backward pass of its own: the same output to the bit, the same gradient up to rounding."""
import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from lightrft.models.cpu_layers import use_cpu_norms

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes the norms")


def pair(family: type[nn.Module] = Qwen2RMSNorm, width: int = 48) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = family(width)
    plain.weight.data.normal_(1.0, 0.3)
    fast = nn.Sequential(copy.deepcopy(plain))
    use_cpu_norms(fast)
    return plain, fast[0]


@pytest.mark.parametrize("family", [Qwen2RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("shape", [(1, 300, 48), (7, 48), (2, 3, 5, 48), (1, 0, 48)])
def test_output_and_gradients(family: type[nn.Module], shape: tuple[int, ...]) -> None:
    x, grad = torch.randn(shape), torch.randn(shape)
    found = []
    for norm in pair(family):
        inputs = x.clone().requires_grad_()
        out = norm(inputs)
        out.backward(grad)
        with torch.no_grad():
            assert torch.equal(norm(x), out)
        found.append((out.detach(), inputs.grad, norm.weight.grad))
    assert torch.equal(found[0][0], found[1][0])
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightrft.models.cpu_layers import _RMSNorm
    x, weight = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((3, 8), (8, )))
    assert torch.autograd.gradcheck(lambda x, w: _RMSNorm.apply(x, w, 1e-6), (x, weight))


def test_it_keeps_its_family_and_its_backward_is_one_operation() -> None:
    plain, fast = pair()
    assert isinstance(fast, Qwen2RMSNorm) and type(fast).__name__ == "Qwen2RMSNorm" and type(plain) is Qwen2RMSNorm
    assert "_RMSNorm" in type(fast(torch.randn(2, 48, requires_grad=True)).grad_fn).__name__
    again = copy.deepcopy(fast)
    again.weight.data.zero_()
    assert not again(torch.randn(2, 48)).any() and fast.weight.all()


def test_frozen_weights_and_inputs() -> None:
    _, fast = pair()
    x = torch.randn(2, 48)
    fast(x).sum().backward()
    assert fast.weight.grad is not None
    _, fast = pair()
    fast.requires_grad_(False)(x.requires_grad_()).sum().backward()
    assert fast.weight.grad is None and x.grad is not None


def test_other_norms_stay() -> None:
    for family in (GemmaRMSNorm, nn.LayerNorm):
        assert type(pair(family)[1]) is family
    half = nn.Sequential(Qwen2RMSNorm(48).bfloat16())
    use_cpu_norms(half)
    assert type(half[0]) is Qwen2RMSNorm
