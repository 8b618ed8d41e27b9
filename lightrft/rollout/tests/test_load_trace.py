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


def test_a_part_may_lack_dimensions_of_the_weight():
    """One expert, rows of a convolution without its middle dimension, a column; a transposed part is no block, also
    where its numbers are those of one."""
    targets = torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(4), torch.zeros(3, 3)

    def load(stream):
        parts = [lambda w: w[1], lambda w: w[2:4].view(-1, 4), lambda w: w[:, 0], lambda w: w.t()]
        for target, part, (_, weight) in zip(targets, parts, stream):
            target.copy_(part(weight))

    shapes = {"experts": (3, 2, 3), "conv": (6, 1, 4), "rows": (4, 1), "square": (3, 3)}
    found = trace_loader(load, {name: torch.Size(shape) for name, shape in shapes.items()})
    assert {name: (copy.start, copy.shape) for name, (copy, ) in found.items()} == {
        "experts": ((1, 0, 0), (1, 2, 3)), "conv": ((2, 0, 0), (2, 1, 4)), "rows": ((0, 0), (4, 1)),
        "square": (None, (3, 3))}  # yapf: disable
