"""Controllers of the KL and entropy coefficients: fixed, or adapted towards a target."""
import math

from lightrft.config.schema import AlgorithmConfig


class KLController:
    """Controller of the KL coefficient; ``value`` is the coefficient in use.

    With a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2): error = clip(kl / target - 1, -0.2, 0.2) and
    value *= 1 + error * samples / horizon. Without one the value stays.
    """

    def __init__(self, value: float, target: float | None = None, horizon: int = 10000) -> None:
        self.value = value
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, samples: int) -> None:
        """Adapt to a rollout with KL ``kl`` (nats per token) over ``samples`` samples; ignore a non-finite one."""
        if self.target is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from :meth:`state_dict`; a fixed value comes from the options."""
        if self.target is not None:
            self.value = state["value"]


def get_kl_controller(cfg: AlgorithmConfig) -> KLController:
    """Return an adaptive controller when ``kl_target`` is set, else a fixed one."""
    return KLController(cfg.init_kl_coef, cfg.kl_target, cfg.kl_horizon)


class EntropyController:
    """Controller of the entropy bonus; ``coef`` is the coefficient in use.

    With a target (Skywork-OR1, arXiv:2505.22312): ``value`` rises by ``step`` where the entropy is below the target and
    falls by it where it is above, within [0, ``limit``]; the bonus is on only where the entropy is not above the
    target, and off until an entropy was measured. Without a target the value stays and is always on.

    The paper uses the entropy of the policy on the rollout before its update; here it is the one that the update
    measured, so that it needs no separate pass and acts on the next step.
    """

    def __init__(self, value: float, target: float | None = None, step: float = 1e-4, limit: float = 0.005) -> None:
        self.value, self.target, self.step, self.limit = value, target, step, limit
        self.active = target is None

    @property
    def coef(self) -> float:
        """Return the value when the bonus is on, else 0."""
        return self.value if self.active else 0.0

    def update(self, entropy: float) -> None:
        """Adapt to a step with mean ``entropy`` (nats per token, all ranks); ignore a non-finite one."""
        if self.target is None or not math.isfinite(entropy):
            return
        direction = (entropy < self.target) - (entropy > self.target)
        self.value = min(max(self.value + direction * self.step, 0.0), self.limit)
        self.active = entropy <= self.target

    def state_dict(self) -> dict[str, float | bool]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "active": self.active}

    def load_state_dict(self, state: dict[str, float | bool]) -> None:
        """Continue from :meth:`state_dict`; a fixed value comes from the options."""
        if self.target is not None:
            self.value, self.active = float(state["value"]), bool(state["active"])


def get_entropy_controller(cfg: AlgorithmConfig) -> EntropyController:
    """Return an adaptive controller when ``entropy_target`` is set, else a fixed one."""
    return EntropyController(cfg.entropy_coef, cfg.entropy_target, cfg.entropy_step, cfg.entropy_coef_max)
