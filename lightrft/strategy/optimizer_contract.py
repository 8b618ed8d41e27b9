"""Test that an optimizer is what its registration says, on a matrix of eight elements, before it trains anything."""
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from lightrft.config.shared_schema import OptimConfig
from lightrft.strategy.optimizers import Optimizer
from lightrft.strategy.optimizers.base import Build
from lightrft.utils.errors import UserError

SHAPE, STEPS, RATE = (4, 2), 3, 0.1
WHOLE, HALVES = (slice(None), ), (slice(0, 4), slice(4, None))  # of the elements


def check_contract(entry: Optimizer, cfg: OptimConfig) -> None:
    """Check the builder, the state, that steps depend on the learning rate of their group and, unless it needs whole
    parameters, that halves of one are updated as in the whole.

    Raises:
        UserError: what differs, and what the registration has to say instead.
    """
    name, declared = cfg.optim, {"step", *entry.moments(cfg)}
    _check_builder(name, entry.build)
    weight, state = _trained(entry, cfg, WHOLE, zeros=False)
    if other := [key for key, value in state.items() if key not in declared or key != "step" and not _is_moment(value)]:
        raise UserError(f"--optim {name}: its state has {', '.join(sorted(other))}; every entry but step must be a "
                        "float32 tensor in the shape of the parameter, named in moments=(...) of its registration")
    started, kept = _trained(entry, cfg, WHOLE, zeros=True)
    if missing := [key for key in entry.moments(cfg) if not torch.as_tensor(kept[key]).any()]:
        raise UserError(f"--optim {name}: its moments {', '.join(missing)} stay 0; drop them from its registration")
    if not torch.allclose(started, weight):
        raise UserError(f"--optim {name}: its first steps differ when its state begins as zeros, as state does here")
    if torch.allclose(_trained(entry, cfg, WHOLE, zeros=True, rate=2 * RATE)[0], weight):
        raise UserError(
            f"--optim {name}: its steps do not depend on the lr of their group, which the schedule sets; read "
            "group['lr'] in step()")
    if not entry.needs_whole and not torch.allclose(_trained(entry, cfg, HALVES, zeros=True)[0], weight):
        raise UserError(f"--optim {name}: it updates half a parameter differently from that half of the whole; "
                        "register it with needs_whole=True")


def _is_moment(value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == SHAPE and value.dtype == torch.float32


def _check_builder(name: str, build: Build) -> None:
    """Raise a UserError unless ``build`` can be called as builders are."""
    try:
        signature(build).bind([], None)
    except TypeError as error:
        raise UserError(f"--optim {name}: its builder is called as (groups, cfg), and takes {signature(build)}: "
                        f"{error}") from error


def _trained(entry: Optimizer, cfg: OptimConfig, parts: tuple[slice, ...], zeros: bool,
             rate: float = RATE) -> tuple[Tensor, dict[str, Any]]:
    """Take steps on flat ``parts`` of a parameter, or on the whole in its shape, each with an optimizer of its own.

    Returns:
        The whole parameter after them, and the state of the last part; with ``zeros`` it began as zeros.
    """
    values = torch.linspace(-1, 1, 8, device="cpu")
    for part in parts:
        weight = torch.nn.Parameter(values[part].clone().view(SHAPE if part in WHOLE else -1))
        rule = entry.build([{"params": [weight], "lr": rate, "weight_decay": 0.1}], cfg)
        if not isinstance(rule, torch.optim.Optimizer):
            raise UserError(f"--optim {cfg.optim}: its builder returns {rule!r}; return a torch.optim.Optimizer")
        if zeros:
            moments = {key: torch.zeros_like(weight) for key in entry.moments(cfg)}
            rule.state[weight] = {"step": torch.zeros((), device="cpu"), **moments}
        for step in range(STEPS):
            weight.grad = torch.sin(5 * weight.detach() + 2 * step + 0.5)  # both signs, which change from step to step
            rule.step()
        values[part] = weight.detach().view(-1)
    return values.view(SHAPE), rule.state[weight]
