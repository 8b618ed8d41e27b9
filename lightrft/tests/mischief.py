"""A plugin whose policy loss misbehaves: ``MISCHIEF=kind@rank:first-last`` (calls are counted from 1 on each rank)."""
import os
import signal
import time
from itertools import count

import torch
from torch import Tensor

from lightrft.algorithms.base import POLICY_LOSSES, policy_loss
from lightrft.config.schema import AlgorithmConfig
from lightrft.types import Experience

_CALLS = count(1)


def due() -> str:
    """The kind of mischief that this call is to make, or nothing."""
    kind, _, when = os.environ.get("MISCHIEF", "").partition("@")
    rank, _, calls = when.partition(":")
    first, _, last = calls.partition("-")
    number = next(_CALLS)
    due = kind and os.environ.get("RANK", "0") == rank and int(first) <= number <= int(last or first)
    return kind if due else ""


@policy_loss("mischief")
def mischief(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """ppo, until it is not."""
    import lightrft.algorithms  # noqa: F401  (registers ppo)
    loss, metrics = POLICY_LOSSES.get("ppo").fn(logprobs, exp, cfg)
    kind = due()
    if kind == "raise":
        raise RuntimeError("the loss of this rank is a pumpkin")
    if kind == "exit":
        os._exit(7)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(1000)
    if kind == "nan":
        loss = loss * float("nan")
    if kind == "gradient":  # finite forwards, 0 * inf backwards
        loss = loss + torch.sqrt(logprobs * 0.0)
    return loss, metrics
