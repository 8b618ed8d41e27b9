"""The coefficient of the KL to the reference model: fixed, or driven towards a target."""
import math

from lightrft.config.schema import AlgorithmConfig


class KLController:
    """``value`` is the coefficient in use.

    With a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2): error = clip(kl / target - 1, -0.2, 0.2) and
    value *= 1 + error * samples / horizon. Without one the value stays.
    """

    def __init__(self, value: float, target: float | None = None, horizon: int = 10000) -> None:
        self.value = value
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """Move after a rollout with KL ``kl`` (nats per token) over ``samples`` samples; stay if it is not finite."""
        if self.target is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint holds."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from :meth:`state_dict`; a fixed value is that of the options."""
        if self.target is not None:
            self.value = state["value"]


def get_kl_controller(cfg: AlgorithmConfig) -> KLController:
    """Adaptive when ``kl_target`` is set, else fixed."""
    return KLController(cfg.init_kl_coef, cfg.kl_target, cfg.kl_horizon)
