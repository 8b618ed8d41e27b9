"""Interface of every rollout engine, with its requests and responses."""
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.models.vocabulary import check_ids
from lightrft.types import Prompt
from lightrft.utils.errors import UserError

T = TypeVar("T")
FINISH_REASONS = ("stop", "length", "abort")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for drawing tokens. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.

    ``repetition_penalty``: before all others, positive logits of the tokens of prompt and response are divided by it,
    and negative ones multiplied (CTRL, arXiv:1909.05858); 1 is off.
    ``first_temperature``: temperature of the first token of a response (FIRE, arXiv:2410.21236); None: the same.
    """
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    first_temperature: float | None = None
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class Request:
    """One prompt and the seeds of its samples: one response per seed. Equal seeds and weights give equal responses,
    whatever else is in the batch and however many ranks there are, as far as the arithmetic of the kernels allows.

    ``media``: the keys of the prompt's pictures and sounds, which an engine that takes media looks up for itself;
    ``unexpanded``: the prompt's tokens with one placeholder per medium.

    ``prefixes``: the tokens that each response has already (empty: none has begun). ``max_new_tokens`` counts the
    prefix too. With the HF engine and SGLang the noise of a token depends on the seed and the token's position alone,
    so a resumed response continues as it would have in one go; with vLLM it continues with noise derived from the
    position where it resumes. The weights may differ from those that drew the prefix.
    """
    token_ids: list[int]
    seeds: list[int]
    media: tuple[str, ...] = ()
    prefixes: list[list[int]] = field(default_factory=list)
    unexpanded: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, prompt: Prompt, seeds: list[int], prefixes: Sequence[list[int]] = ()) -> "Request":
        """Request responses to ``prompt``."""
        return cls(prompt.token_ids, seeds, prompt.media, list(prefixes), prompt.unexpanded_ids)


@dataclass
class Completion:
    """One response: its tokens (a matched stop token included, a prefix not) and their log-probs, in nats, under the
    distribution that was sampled (after temperature, top-k, top-p, min-p; for greedy: the temperature-1 softmax).

    ``appended``: the runs [start, stop) of tokens that a :class:`Continuation` appended; their log-probs are 0.
    """
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" | "length" | "abort"
    appended: list[tuple[int, int]] = field(default_factory=list)

    @property
    def drawn(self) -> list[bool]:
        """One flag per token: True where the policy drew it. The loss mask of the response."""
        return self.per_token(True, False)

    def per_token(self, drawn: T, appended: T) -> list[T]:
        """Return one value per token: ``drawn`` where the policy drew it, else ``appended``."""
        values = [drawn] * len(self.token_ids)
        for start, stop in self.appended:
            values[start:stop] = [appended] * (stop - start)
        return values

    def extend(self, more: "Completion") -> None:
        """Append what was generated after these tokens, with its finish reason."""
        begun = len(self.token_ids)
        self.token_ids, self.logprobs = self.token_ids + more.token_ids, self.logprobs + more.logprobs
        self.appended = self.appended + [(begun + start, begun + stop) for start, stop in more.appended]
        self.finish_reason = more.finish_reason


@dataclass(frozen=True)
class Continuation:
    """The start of a response's next turn: tokens that are appended without being drawn, before generation resumes."""
    token_ids: list[int]


Key = tuple[int, int]  # number of the request, index among its seeds


class Generated(NamedTuple):
    """Tokens that a response has drawn since its last report, up to its end, a stop token or an abort.

    ``sample``: the index of the response among the seeds of the request.
    """
    request: int
    sample: int
    part: Completion


Ended = Sequence[tuple[int, int, Completion]]  # request, index among its seeds, response
Finished = Callable[[int, list[Completion]], bool | None]
Arrived = Callable[[Ended], None]


@runtime_checkable
class PendingAnswer(Protocol):
    """An answer that may not be there yet, such as a :class:`concurrent.futures.Future`."""

    def done(self) -> bool:
        """Return True once the answer is there."""

    def result(self) -> Continuation | None:
        """Return the answer, or raise the error that it met."""


Answer = Continuation | PendingAnswer | None
NextTurn = Callable[[Ended], Sequence[Answer]]


def refuse_media(engine: str, kinds: Iterable[str], reason: str) -> None:
    """Refuse an engine for data with media of these kinds, if there are any.

    Raises:
        UserError: with the engine that takes them.
    """
    if kinds := list(kinds):
        raise UserError(f"--engine_type {engine}: {reason}, and the prompts have media of kind {', '.join(kinds)}: use "
                        "--engine_type hf")


def check_requests(requests: list[Request], params: SamplingParams, engine: str, vocabulary: int, longest: int = 0,
                   takes_media: bool = False) -> None:
    """Refuse requests that no engine can run on a model of ``vocabulary`` tokens.

    ``longest``: most tokens of a prompt and its response that the engine was started for; 0: any number.
    ``takes_media``: the model takes media, and the engine has a source of them.

    Raises:
        ValueError: no new tokens, an empty prompt, a prefix that leaves no room, a token that the model does not have,
            media, or more tokens than ``longest``.
    """
    if params.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {params.max_new_tokens}")
    for i, request in enumerate(requests):
        if not request.token_ids:
            raise ValueError(f"request {i} has an empty prompt")
        if (begun := max(map(len, request.prefixes), default=0)) >= params.max_new_tokens:
            raise UserError(
                f"request {i} resumes from {begun} tokens, but a response may have {params.max_new_tokens}; "
                "use the --generate_max_len that it was started with")
        for ids in (request.token_ids, *request.prefixes):
            check_ids(f"request {i}", ids, vocabulary)
        if request.media and not takes_media:
            raise ValueError(f"request {i} has media ({', '.join(request.media)}); the {engine} engine takes text only")
        if longest and len(request.token_ids) + params.max_new_tokens > longest:
            raise UserError(f"request {i}: {len(request.token_ids)} prompt + {params.max_new_tokens} new tokens are "
                            f"more than the {longest} that the {engine} engine was started for; raise "
                            "--prompt_max_len or --generate_max_len")


def stop_ids(eos_token_ids: Iterable[int], params: SamplingParams, vocabulary: int) -> list[int]:
    """The tokens of a model of ``vocabulary`` tokens that end a response, sorted."""
    return sorted({i for i in (*eos_token_ids, *params.stop_token_ids) if i < vocabulary})


class SteppedEngine(Protocol):
    """An engine that generates in rounds, and takes requests at any time. A
    :class:`~lightrft.rollout.scheduler.Scheduler` runs them to their end.

    A response is known by its :data:`Key`. After a stop token it is finished; with ``waits`` it waits instead, until
    :meth:`resume` or :meth:`abort`, and holds up no other response.

    ``weight_version`` is the version of the last update: 0 before any, and after the first one. ``group`` is the CPU
    process group of the ranks that share the engine: they submit all of their requests and take all steps alike. None:
    this rank alone.
    """
    weight_version: int
    group: dist.ProcessGroup | None

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the model."""

    def submit(self, requests: list[Request], params: SamplingParams, waits: bool = False) -> int:
        """Queue requests; return the number of the first, from which theirs count."""

    def step(self) -> list[Generated]:
        """Run one round; return what has ended in it, aborted responses before all others. Empty, without a round, if
        every response waits for an answer, or there is none."""

    def resume(self, key: Key, token_ids: list[int], params: SamplingParams | None = None) -> None:
        """Append the answer that a response waits for; ``params``: of all that it draws from now on.

        Raises:
            KeyError: the response does not wait.
        """

    def abort(self, keys: Iterable[Key]) -> None:
        """End responses. What they have drawn since their last report comes from the next :meth:`step`, as "abort"
        unless they had ended; of those that wait nothing comes, and finished ones are skipped."""


class RolloutEngine(SteppedEngine, Protocol):
    """An engine that lives in the training process.

    An engine with its own weights refuses to generate until the first update. The verification of the weight sync
    (:mod:`lightrft.rollout.weight_sync.verify`) reads fingerprints of its weights, under names and in an order that the
    verification chooses.
    """

    def generate(self, requests: list[Request], params: SamplingParams, on_finished: Finished | None = None,
                 on_arrived: Arrived | None = None, next_turn: NextTurn | None = None) -> list[list[Completion]]:
        """Return responses in the order of ``requests`` and their seeds.

        ``on_finished(i, completions)`` is called as soon as all responses of request ``i`` are done. Once it returns
        True, no further token is drawn, and unfinished responses come back as they are ("abort"), perhaps empty. Ranks
        that share the engine stop once each has had True or all its responses; until then it is called for further
        requests. ``on_arrived`` gets every response as soon as it is done, those that end together in one call, before
        ``on_finished`` reports its request.

        ``next_turn`` connects tools and environments. It gets the responses that have just drawn a stop token, and
        returns for each None (the response is finished) or a :class:`Continuation`, whose tokens are appended before
        the response resumes as if they were a prefix. Instead of an answer it may return a :class:`PendingAnswer`: the
        other responses go on until that is there. ``max_new_tokens`` counts appended tokens too: a continuation
        after which no token could be drawn is dropped, and the response ends with "length". It does not get responses
        that have reached ``max_new_tokens`` without a stop token. Ranks that share the engine all pass ``next_turn`` or
        none does; each is asked for its own requests.

        Raises:
            UserError: ``next_turn`` appends a token that the model does not have.
        """

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load full weights under their HF names; later responses come from them alone."""

    def shared_storage(self) -> set[int]:
        """Addresses (``data_ptr``) of the trainer's tensors that it computes with; empty: it has its own weights."""

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        """HF names of the weights that :meth:`fingerprints` can read, and the dtypes they are held in. Known before the
        first update, and fixed. A weight that is quantized, or stored in a layout that cannot be read, is left out:
        only the canaries of the verification cover it."""

    def fingerprints(self, names: list[str]) -> Tensor:
        """Current :func:`lightrft.ops.fingerprint.fingerprints` of these weights: int64 [names], on the CPU.

        A fused tensor counts with the rows that belong to the name. Tensor-parallel ranks all return the sum over
        their parts.
        """

    def sleep(self) -> None:
        """Free the memory that only generation needs."""

    def wake(self) -> None:
        """Undo :meth:`sleep`."""

    def shutdown(self) -> None:
        """Release everything; the engine cannot be used afterwards."""


@runtime_checkable
class ShowsPositions(Protocol):
    """An engine that computes the positions of tokens itself."""

    def positions(self, request: Request) -> Tensor | None:
        """Return the positions [3, L] of the tokens of the prompt of ``request``; None: their index. Ranks that share
        the engine all ask for the same request."""


@runtime_checkable
class ShowsMedia(Protocol):
    """An engine that has its own form of the tensors of media."""

    def media_tensors(self, request: Request) -> dict[str, list[Tensor]]:
        """Return the tensors of each medium of the prompt of ``request``, by the processor's names."""


@runtime_checkable
class KeepsWeights(Protocol):
    """An engine that receives frozen weights once, and again only after it has lost them."""

    @property
    def apart(self) -> bool:
        """True if updates bring the matrices of LoRA adapters apart from the base weights, and not merged."""

    @property
    def holds_weights(self) -> bool:
        """True if the engine still has the weights that training does not change: the next update leaves them out."""
