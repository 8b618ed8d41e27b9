"""What every rollout engine does, and the requests it takes."""
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lightrft.config.schema import RolloutConfig
from lightrft.utils.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.

    ``first_temperature``: of the first token of a response (FIRE, arXiv:2410.21236); None: the same.
    """
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    first_temperature: float | None = None


@dataclass(frozen=True)
class Request:
    """One prompt and the seeds of its samples: one response per seed. Equal seeds and weights give equal responses,
    whatever else is in the batch and however many ranks there are."""
    token_ids: list[int]
    seeds: list[int]
    mm_inputs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Completion:
    """One response: the generated tokens (a matched stop token included) and their log-probs, in nats, under the
    distribution that was sampled (after temperature, top-k, top-p, min-p; for greedy: the temperature-1 softmax)."""
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" | "length" | "abort"


class RolloutEngine(Protocol):
    """An engine that lives in the training process. ``weight_version`` counts the updates it has received."""
    weight_version: int

    def generate(self, requests: list[Request], params: SamplingParams,
                 on_finished: Callable[[int, list[Completion]], None] | None = None) -> list[list[Completion]]:
        """Responses in the order of ``requests`` and their seeds. ``on_finished(i, completions)`` is called as soon as
        all responses of request ``i`` are done."""

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over full weights under their HF names; later responses come from them alone."""

    def sleep(self) -> None:
        """Give back the memory that only generation needs."""

    def wake(self) -> None:
        """Undo :meth:`sleep`."""

    def shutdown(self) -> None:
        """Release everything; the engine cannot be used afterwards."""


def get_engine(cfg: RolloutConfig, actor: Any, strategy: Any, tokenizer: Any, bf16: bool = False) -> RolloutEngine:
    """The engine ``cfg.engine_type`` for ``actor``, an :class:`~lightrft.models.actor_language.ActorLanguage` already
    placed by ``strategy``. Its weights are those of ``actor`` after the first ``sync_weights``.

    Raises:
        ValueError: there is no such engine.
    """
    if cfg.engine_type == "hf":
        from lightrft.rollout.hf_engine import build_hf_engine
        return build_hf_engine(cfg, actor, strategy.device, tokenizer, bf16)
    raise UserError(f"unknown engine_type {cfg.engine_type!r}; known: hf")
