"""Running mean and standard deviation of rewards."""
import torch
from torch import Tensor


class RunningMoments:
    """Welford / Chan et al. (1979) parallel update, in float64; ``std`` is unbiased, 1 until two values were seen."""

    def __init__(self) -> None:
        self.count, self.mean, self.m2 = 0.0, 0.0, 0.0

    def update(self, values: Tensor) -> None:
        """Take in a batch (any shape); an empty one changes nothing."""
        if values.numel() == 0:
            return
        values = values.double()
        n, mean = float(values.numel()), values.mean().item()
        delta, total = mean - self.mean, self.count + n
        self.m2 += ((values - mean)**2).sum().item() + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.count = total

    @property
    def std(self) -> float:
        """Unbiased standard deviation of everything seen."""
        variance = self.m2 / (self.count - 1) if self.count > 1 else 1.0
        return variance**0.5 if variance > 0 else 1.0

    def normalise(self, values: Tensor, minus_mean: bool) -> Tensor:
        """Values over the running std, centred when ``minus_mean``."""
        centred = values - self.mean if minus_mean else values
        return torch.div(centred, self.std)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint holds."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from :meth:`state_dict`."""
        self.count, self.mean, self.m2 = state["count"], state["mean"], state["m2"]
