"""A plugin that makes a rank fail: ``FAULT=kind@rank:first-last`` (calls are counted from 1 on each rank)."""
import os
import signal
import time
from itertools import count

import torch
from torch import Tensor

from lightrft.algorithms.base import POLICY_LOSSES, policy_loss
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.aggregate import Denominators
from lightrft.trainer.logprob_pass import LogprobPass
from lightrft.trainer.replay_buffer import MiniBatch
from lightrft.types import Experience

_CALLS = count(1)


def due() -> str:
    """The kind of fault that is due at this call, or an empty string."""
    kind, _, when = os.environ.get("FAULT", "").partition("@")
    rank, _, calls = when.partition(":")
    first, _, last = calls.partition("-")
    number = next(_CALLS)
    due = kind and os.environ.get("RANK", "0") == rank and int(first) <= number <= int(last or first)
    return kind if due else ""


@policy_loss("faulty")
def faulty(logprobs: Tensor, exp: Experience, cfg: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """ppo, until the fault is due."""
    import lightrft.algorithms  # noqa: F401  (registers ppo)
    loss, metrics = POLICY_LOSSES.get("ppo").fn(logprobs, exp, cfg)
    kind = due()
    if kind == "raise":
        raise RuntimeError("the loss of this rank is broken")
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


def failing_reference(self: LogprobPass, exp: Experience) -> None:
    """The pass of the reference, on the rank where it fails."""
    raise RuntimeError("the reference of this rank is broken")


def own_denominators(self: MiniBatch, kept: Tensor, norm: float, all_seqs: bool = False) -> Denominators:
    """:meth:`MiniBatch.denominators` with a mistake: each rank divides by the counts of its own samples."""
    counts = kept[[i for part in self.micro_batches for i in part]]
    return Denominators(counts.sum().item(), ((counts > 0) | all_seqs).sum().item(), norm)


if os.environ.get("FAULT") == f"reference@{os.environ.get('RANK')}":
    LogprobPass._ref = failing_reference  # type: ignore[assignment,method-assign]
if os.environ.get("FAULT") == "denominators":
    MiniBatch.denominators = own_denominators  # type: ignore[method-assign]
