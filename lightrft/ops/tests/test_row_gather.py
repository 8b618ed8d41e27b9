"""Gathers of rows against indexing."""
import pytest
import torch

from lightrft.ops.segment import RowGather


@pytest.mark.parametrize("index", [[2, 0, 2, 2, 1], [3, 1, 0, 2], [1], []], ids=str)
@pytest.mark.parametrize("shape", [(), (3, 2)], ids=str)
def test_it_is_indexing_forward_and_backward(index, shape):
    x, index = torch.randn(4, 2, *shape, requires_grad=True), torch.tensor(index, dtype=torch.long)
    out = RowGather(index, 4, "cpu")(x)
    assert torch.equal(out, x[index])
    weight = torch.randn_like(out)
    found, expected = (torch.autograd.grad((each * weight).sum(), x)[0] for each in (out, x[index]))
    torch.testing.assert_close(found, expected)


def test_padding_has_no_gradient():
    x, index = torch.randn(3, 2, requires_grad=True), torch.tensor([0, 0, 2, 1, 1])
    out = RowGather(index, 3, "cpu", used=torch.tensor([1, 0, 1, 1, 0]).bool())(x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 2))
