"""Running moments equal those of everything seen at once."""
import pytest
import torch

from lightrft.trainer.advantage_calculator import RunningMoments


def test_equals_all_values_at_once():
    values = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 3 + 1e3
    moments = RunningMoments()
    for part in values.split([1, 30, 0, 60, 9]):
        moments.update(part)
    assert (moments.count, moments.mean) == (100, pytest.approx(values.double().mean().item(), rel=1e-9))
    assert moments.std == pytest.approx(values.double().std().item(), rel=1e-9)
    assert torch.allclose(moments.normalise(values, True), (values - values.mean()) / values.std(), atol=1e-4)
    assert torch.allclose(moments.normalise(values, False), values / values.std(), atol=1e-4)


@pytest.mark.parametrize("seen", [[], [2.0], [2.0, 2.0, 2.0]])
def test_the_std_is_one_until_values_differ(seen):
    moments = RunningMoments()
    moments.update(torch.tensor(seen))
    assert moments.std == 1.0


def test_state_goes_on():
    first, second = RunningMoments(), RunningMoments()
    first.update(torch.tensor([1.0, 5.0]))
    second.load_state_dict(first.state_dict())
    for moments in (first, second):
        moments.update(torch.tensor([3.0]))
    assert second.state_dict() == first.state_dict() == {"count": 3.0, "mean": 3.0, "m2": 8.0}
