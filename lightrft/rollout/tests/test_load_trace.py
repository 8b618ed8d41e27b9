"""Traces of loaders: copies of parts of a weight, and their targets."""
import torch

from lightrft.rollout.weight_sync.load_trace import trace_loader


def test_a_loader_is_watched():
    """Parts are blocks as long as they are what came; what the model copies of its own is no part of a weight."""
    fused, norm, derived = torch.zeros(5, 3), torch.ones(3), torch.zeros(3)

    def load(stream):
        for name, weight in stream:
            if name == "norm":
                weight += 1.0
                norm.copy_(weight)
                derived.copy_(norm).add_(1.0)
                norm.copy_(weight)
            else:
                fused[1:3].copy_(weight[2:])
                fused[3:].copy_(weight[:2] * 2)

    found = trace_loader(load, {"norm": norm.shape, "half": torch.Size([4, 3])})
    assert [copy.start for copy in found["norm"]] == [None] and [copy.start for copy in found["half"]] == [(2, 0), None]
    assert found["half"][0].view.data_ptr() == fused[1].data_ptr() and not fused.any()
    assert norm.tolist() == [1.0] * 3 and derived.tolist() == [2.0] * 3
