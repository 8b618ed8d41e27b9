"""Learning-rate schedules as factors on the peak rate."""
import math
from collections.abc import Callable

from lightrft.config.schema import TrainConfig


def lr_schedule(name: str, total_steps: int, warmup_ratio: float, min_ratio: float) -> Callable[[int], float]:
    """Factor on the peak learning rate at optimizer step 0, 1, ...: linear warm-up, then ``name``.

    Args:
        name: ``constant``, ``linear`` (to 0) or ``cosine_with_min_lr`` (to ``min_ratio``).
        total_steps: optimizer steps of the whole run.
        warmup_ratio: share of ``total_steps`` spent warming up, rounded up.
        min_ratio: floor of the cosine.
    """
    warmup = math.ceil(round(total_steps * warmup_ratio, 6))  # 100 * 0.07 is a little more than 7
    decay = {
        "constant": lambda x: 1.0,
        "linear": lambda x: 1.0 - x,
        "cosine_with_min_lr": lambda x: min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * x)),
    }[name]

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return decay(min((step - warmup) / max(total_steps - warmup, 1), 1.0))

    return factor


def schedule_of(cfg: TrainConfig, total_steps: int) -> Callable[[int], float]:
    """The schedule that the options ask for."""
    return lr_schedule(cfg.lr_scheduler, total_steps, cfg.lr_warmup_ratio, cfg.lr_min_ratio)
