"""A plugin that makes a rank fail: ``FAULT=kind@rank:first-last`` (calls are counted from 1 on each rank)."""
import os
import signal
import time
from itertools import count

import torch
from torch import Tensor

from lightrft.algorithms.base import POLICY_LOSSES, policy_loss
from lightrft.config.options import ConfigError
from lightrft.config.schema import AlgorithmConfig
from lightrft.ops.aggregate import Denominators
from lightrft.preflight.hardware import Device, Machine
from lightrft.trainer import session
from lightrft.trainer.logprob_pass import LogprobPass
from lightrft.trainer.batch_plan import MiniBatch
from lightrft.types import Experience
from lightrft.utils.errors import UserError

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


def old_machine(ranks: int, *_: int) -> Machine:
    """A machine whose GPU lacks bfloat16."""
    return Machine(ranks, Device("cuda:0", 1 << 40, 1 << 40), "Tesla T4", bf16=False)


def lacks_data(*_: object) -> None:
    """A machine on which the data are not."""
    raise ConfigError("--prompt_data train.jsonl: no such file or folder")


def lacks_gpu(local_rank: int, local_ranks: int) -> torch.device:
    """A machine with fewer GPUs than ranks, as :func:`lightrft.utils.gpu.rank_device` says it."""
    raise UserError(f"{local_ranks} processes on this machine (LOCAL_RANK {local_rank}), but torch sees 1 GPU")


class LateStore(torch.distributed.PrefixStore):
    """A store from which a rank reads late."""

    def get(self, key: str) -> bytes:
        """Wait, and read."""
        time.sleep(0.5)
        return super().get(key)

    def wait(self, keys: list[str]) -> None:
        """Wait twice."""
        time.sleep(0.5)
        super().wait(keys)


if os.environ.get("LATE") == os.environ.get("RANK", "0"):
    torch.distributed.PrefixStore = LateStore  # type: ignore[misc]
if os.environ.get("FAULT") == f"old_machine@{os.environ.get('RANK')}":
    Machine.here = old_machine  # type: ignore[assignment,method-assign]
if os.environ.get("FAULT") == f"invalid@{os.environ.get('RANK')}":
    session.validate = lacks_data  # type: ignore[attr-defined]
if os.environ.get("FAULT") == f"no_gpu@{os.environ.get('RANK')}":
    session.rank_device = lacks_gpu  # type: ignore[attr-defined]
if os.environ.get("FAULT") == f"reference@{os.environ.get('RANK')}":
    LogprobPass._ref = failing_reference  # type: ignore[assignment,method-assign]
if os.environ.get("FAULT") == "denominators":
    MiniBatch.denominators = own_denominators  # type: ignore[method-assign]
