"""Interface of every rollout engine."""
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from lightrft.models.vocabulary import check_ids
from lightrft.types import Episode, Key, Prompt, prompt_groups, Segment
from lightrft.utils.errors import UserError

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


def refuse_media(engine: str, kinds: Iterable[str], reason: str) -> None:
    """Refuse an engine for data with media of these kinds, if there are any.

    Raises:
        UserError: with the engine that takes them.
    """
    if kinds := list(kinds):
        raise UserError(f"--engine_type {engine}: {reason}, and the prompts have media of kind {', '.join(kinds)}: use "
                        "--engine_type hf")


def check_episodes(episodes: Iterable[Episode], params: SamplingParams, engine: str, vocabulary: int, longest: int = 0,
                   takes_media: bool = False) -> None:
    """Refuse episodes that no engine can run on a model of ``vocabulary`` tokens.

    ``longest``: most tokens of a prompt and its response that the engine was started for; 0: any number.
    ``takes_media``: the model takes media, and the engine has a source of them.

    Raises:
        ValueError: no new tokens, an empty prompt, a response that leaves no room, a token that the model does not
            have, media, or more tokens than ``longest``.
    """
    if params.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {params.max_new_tokens}")
    for group in prompt_groups(episodes):
        prompt, name = group[0].prompt, f"prompt {group[0].group_id}"
        if not prompt.token_ids:
            raise ValueError(f"{name} is empty")
        responses = [episode.response_ids for episode in group if episode.segments]
        if (begun := max(map(len, responses), default=0)) >= params.max_new_tokens:
            raise UserError(f"a response to {name} resumes from {begun} tokens, but may have {params.max_new_tokens}; "
                            "use the --generate_max_len that it was started with")
        check_ids(name, [*prompt.token_ids, *chain.from_iterable(responses)], vocabulary)
        media = [*prompt.media, *(key for episode in group for span in episode.media_spans for key in span.keys)]
        if media and not takes_media:
            raise ValueError(f"{name} has media ({', '.join(media)}); the {engine} engine takes text only")
        if longest and len(prompt.token_ids) + params.max_new_tokens > longest:
            raise UserError(f"{name}: {len(prompt.token_ids)} prompt + {params.max_new_tokens} new tokens are more "
                            f"than the {longest} that the {engine} engine was started for; raise --prompt_max_len or "
                            "--generate_max_len")


def stop_ids(eos_token_ids: Iterable[int], params: SamplingParams, vocabulary: int) -> list[int]:
    """The tokens of a model of ``vocabulary`` tokens that end a response, sorted."""
    return sorted({i for i in (*eos_token_ids, *params.stop_token_ids) if i < vocabulary})


class SteppedEngine(Protocol):
    """An engine that generates in rounds, and takes episodes at any time. A
    :class:`~lightrft.rollout.scheduler.Scheduler` runs them to their end.

    It appends what it draws to the episodes themselves: segments of tokens (a matched stop token included), their
    log-probs, in nats, under the distribution that was sampled (after temperature, top-k, top-p, min-p; for greedy: the
    temperature-1 softmax), and the version of the weights that drew them. An episode has all of its tokens, and its
    ``finish_reason``, one of :data:`FINISH_REASONS`, when :meth:`step` returns it, and perhaps some of them before.

    A response is known by a key, which no other unfinished one has. After a stop token it is finished; with ``waits``
    it waits instead, until :meth:`resume` or :meth:`abort`, and holds up no other response. Equal seeds and weights
    give equal responses, whatever else is in the batch and however many ranks there are, as far as the arithmetic of
    the kernels allows.

    ``weight_version`` is the version of the last update: 0 before any, and after the first one. ``group`` is the CPU
    process group of the ranks that share the engine: they submit the episodes of all and take all steps alike. None:
    this rank alone.
    """
    weight_version: int
    group: dist.ProcessGroup | None

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the model."""

    def submit(self, episodes: Mapping[Key, Episode], params: SamplingParams, waits: bool = False) -> None:
        """Queue unfinished episodes. Neighbours of one role and group with the same prompt share it.

        An episode resumes from the tokens that it has; ``max_new_tokens`` counts them too. With the HF engine and
        SGLang the noise of a token depends on the seed and the token's position alone, so it continues as it would
        have in one go; with vLLM it continues with noise derived from the position where it resumes. The weights may
        differ from those that drew its tokens.
        """

    def step(self) -> dict[Key, Episode]:
        """Run one round; return the episodes that have ended in it, aborted ones before all others. Empty, without a
        round, if every response waits for an answer, or there is none.

        A round that returns nothing has drawn a token, or calls :func:`~lightrft.utils.watchdog.tick` when it sees
        that its library goes on: a scheduler does not wait for ever for an engine that does neither.
        """

    def resume(self, key: Key, segment: Segment, params: SamplingParams | None = None) -> None:
        """Append the given tokens that a response waits for; ``params``: of all that it draws from now on.

        Raises:
            KeyError: the response does not wait.
        """

    def abort(self, keys: Iterable[Key]) -> None:
        """End responses. The next :meth:`step` returns them with what they have drawn, as "abort" unless they had
        ended; those that wait do not come again, and finished ones are skipped."""

    def reset(self) -> None:
        """End all responses, of which none is returned, and free what only they need: after an error."""


class RolloutEngine(SteppedEngine, Protocol):
    """An engine that lives in the training process.

    An engine with its own weights refuses to generate until the first update. The verification of the weight sync
    (:mod:`lightrft.rollout.weight_sync.verify`) reads fingerprints of its weights, under names and in an order that the
    verification chooses.
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

    def positions(self, prompt: Prompt) -> Tensor | None:
        """Return the positions [3, L] of the tokens of a prompt; None: their index. Ranks that share the engine all ask
        for the same prompt."""


@runtime_checkable
class ShowsMedia(Protocol):
    """An engine that has its own form of the tensors of media."""

    def media_tensors(self, prompt: Prompt) -> dict[str, list[Tensor]]:
        """Return the tensors of each medium of a prompt, by the processor's names."""


@runtime_checkable
class ChangesWeights(Protocol):
    """An engine that stores functions of some weights, element by element, in their place.

    Attributes:
        stored_forms: the functions, by name of the weight.
    """
    stored_forms: Mapping[str, Callable[[Tensor], Tensor]]


@runtime_checkable
class KeepsWeights(Protocol):
    """An engine that receives frozen weights once, and again only after it has lost them."""

    @property
    def apart(self) -> bool:
        """True if updates bring the matrices of LoRA adapters apart from the base weights, and not merged."""

    @property
    def holds_weights(self) -> bool:
        """True if the engine still has the weights that training does not change: the next update leaves them out."""
