"""The records that pass through the trainer: Prompt, Sample and Experience, and what a medium of a prompt becomes."""
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from lightrft.ops.segment import HERE, expand, position_ids, Ranks
from lightrft.utils.tensors import upload


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, rendered and tokenized; the same for every modality.

    ``media`` are keys (``image:`` and a hash, say) of its pictures, videos and sounds, in the order of their
    appearance. What they name is decoded and processed where it is used, and never sent to other ranks. In
    ``token_ids`` every medium has as many tokens as it has features; in ``text`` and ``unexpanded_ids``, for engines
    that process media themselves, it has one placeholder. ``template_kwargs`` are those with which a chat template
    rendered the messages (tools, say), for models with a template of their own.
    """
    uid: str
    token_ids: list[int]
    text: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    data_source: str = ""
    label: str = ""
    reference: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    media: tuple[str, ...] = ()
    unexpanded_ids: list[int] = field(default_factory=list)  # empty without media
    template_kwargs: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class MediaTensors:
    """Tensors that a model's processor makes of one picture, video or sound.

    ``tensors`` have the processor's names and are those of a batch of one; ``text`` replaces the placeholder in the
    prompt. ``cut_s`` is how many seconds of a sound were left out at its end.
    """
    kind: str  # "image" | "video" | "audio"
    tensors: dict[str, Tensor]
    text: str
    cut_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class MediaSource(Protocol):
    """Source of media and of their tensors by key."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the media of the whole data, the same on every rank."""

    @property
    def most(self) -> dict[str, int]:
        """Most media of each kind in one row."""

    @property
    def settings(self) -> str:
        """Hash of everything but the content that decides about the tensors of a medium."""

    def open(self, key: str) -> Any:
        """Decode the medium ``key``: a Pillow picture, ``samples`` and ``rate`` of a sound, or ``frames``."""

    def tensors(self, key: str) -> MediaTensors:
        """Return what the processor makes of the medium ``key``, on the CPU."""

    def prefetch(self, keys: Iterable[str]) -> None:
        """Make the tensors of media in the background."""

    def decode_ahead(self, keys: Iterable[str]) -> None:
        """Decode media in the background, for an engine that opens them."""

    def blank(self, kind: str) -> MediaTensors:
        """Return a small medium of ``kind``, for a rank that has none."""


@dataclass
class Sample:
    """One response. ``token_ids`` holds prompt and response; the other lists have the same length.

    ``logprobs`` are the engine's log-probs, in nats, under the distribution that was sampled; 0 on tokens that were not
    generated. ``weight_versions`` are the versions of the weights that sampled each token; -1 on the other tokens.
    """
    prompt: Prompt
    group_id: int  # index of the prompt in the global rollout batch
    index: int  # index of the sample in its group
    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: str  # "stop" | "length" | "abort"
    text: str = ""  # the response only, decoded without special tokens at its end

    @property
    def response_len(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.token_ids) - len(self.prompt.token_ids)


def flatten(rows: Iterable[list[Any]], dtype: type) -> Tensor:
    """Join lists of numbers, one after another, in one vector."""
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype))


def _per(axis: str) -> Any:
    return field(default=None, metadata={"axis": axis})


@dataclass
class Experience:
    """B sequences packed into one row of T tokens; index t of every [T] field describes token t.

    ``logprobs[t] = log p(token_t | tokens before)`` and ``values[t]`` is the value of the state in which token t was
    chosen, so nothing is ever shifted; both are 0 where undefined. Masks are bool, True = keep.
    """
    token_ids: Tensor = field(metadata={"axis": "T"})  # int64 [T]
    cu_seqlens: Tensor = field(metadata={"axis": "cu"})  # int32 [B + 1], starts with 0, ends with T
    loss_mask: Tensor = field(metadata={"axis": "T"})  # bool [T], True on tokens the policy drew and learns from
    group_ids: Tensor = _per("B")  # int64 [B], samples of one prompt share one id
    sample_ids: Tensor = _per("B")  # int64 [B], position in the global rollout batch
    rewards: Tensor = _per("B")  # float32 [B], after shaping; meaningless where not scored
    scored: Tensor = _per("B")  # bool [B]
    reward_parts: Tensor = _per("B")  # float32 [B, K], every reward part before its weight; NaN where it does not judge
    part_weights: Tensor = _per("B")  # float32 [B, K], the weights of the parts in the sample's reward
    margins: Tensor = _per("B")  # float32 [B], by which the reward of the chosen sequence of a pair is to be higher
    labels: Tensor = _per("B")  # [B] or [B, K], probability that the sequence, or the chosen one of its pair, is good
    step_labels: Tensor = _per("T")  # float32 [T], of the step that a token of the loss ends (of process rewards)
    ref_sums: Tensor = _per("B")  # float64 [B], log-probs of the reference, summed over the tokens in the loss
    matched: Tensor = _per("B")  # float64 [B], margin of the reference that a pair meets (of aot); equal in a pair
    nll_weights: Tensor = _per("B")  # float64 [B], of the chosen sequence's NLL per token (of pairs); equal in a pair
    baseline_rewards: Tensor = _per("B")  # float32 [B], of the prompt's greedy response, shaped alike; NaN: unscored
    baseline_lengths: Tensor = _per("B")  # float32 [B], tokens of that response
    truncated: Tensor = _per("B")  # bool [B], the response hit the length limit
    weight_versions: Tensor = _per("T")  # int32 [T], of the weights that the engine drew the token with; -1: not drawn
    rollout_logprobs: Tensor = _per("T")
    old_logprobs: Tensor = _per("T")
    ref_logprobs: Tensor = _per("T")
    teacher_logprobs: Tensor = _per("T")
    values: Tensor = _per("T")
    token_rewards: Tensor = _per("T")
    step_rewards: Tensor = _per(
        "T")  # float32 [T], reward of the step that the token ends, part of the sample's; NaN: none
    advantages: Tensor = _per("T")
    entropies: Tensor = _per("T")  # of the old policy, in nats; set with high_entropy_token_ratio only
    high_entropy_mask: Tensor = _per("T")  # bool [T], the tokens that alone get a policy gradient; None: all
    selected: Tensor = _per("T")  # bool [T], what the policy loss chose of the current mini-batch; False elsewhere
    returns: Tensor = _per("T")
    token_weights: Tensor = _per("T")  # float32 [T], of the gradient of a token, which counts as one token all the same
    media: list[tuple[str, ...]] | None = field(default=None, metadata={"axis": "list"})  # keys, B tuples
    prompt_lens: list[int] | None = field(default=None, metadata={"axis": "list"})  # B; later media tokens are text
    ranks: ClassVar[Ranks] = HERE  # all sequences of the batch are here
    before: ClassVar[list[int] | None] = None  # no sequence continues another

    @classmethod
    def pack(cls, token_ids: Iterable[list[int]], loss_mask: Iterable[list[bool]] | None = None,
             **values: Any) -> "Experience":
        """Pack sequences on the CPU.

        Args:
            token_ids: B lists.
            loss_mask: lists of the same lengths; None: no token is in the loss.
            values: further fields.
        """
        rows = [*token_ids]
        cu = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
        mask = torch.zeros(int(cu[-1]), dtype=torch.bool) if loss_mask is None else flatten(loss_mask, np.bool_)
        return cls(flatten(rows, np.int64), cu, mask, **values)

    @property
    def num_seqs(self) -> int:
        """Number of sequences, B."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.token_ids)

    @property
    def drawn(self) -> Tensor:
        """bool [T]: the tokens that the policy drew, in the loss or not; ``loss_mask`` where no policy drew any.

        They keep log-probs and values even after some have left the loss, so that all passes forward the same rows. A
        matmul over another number of rows rounds differently, and the first ratio would not be 1.
        """
        return self.loss_mask if self.weight_versions is None else self.weight_versions >= 0

    @property
    def seq_lens(self) -> Tensor:
        """[B]: number of tokens of each sequence."""
        return self.cu_seqlens.diff()

    @cached_property
    def lens(self) -> list[int]:
        """Number of tokens of each sequence, on the host; without a sync after :meth:`to`."""
        return self.seq_lens.tolist()

    @property
    def positions(self) -> Tensor:
        """int64 [T]: index of each token in its sequence."""
        return position_ids(self.cu_seqlens, self.num_tokens)

    @cached_property
    def actions(self) -> Tensor:
        """int64 [N]: the positions in [T] of the tokens of ``drawn`` with a predecessor; without a sync after
        :meth:`to`."""
        return (self.drawn & (position_ids(self.cu_seqlens, self.num_tokens) > 0)).nonzero()[:, 0]

    @property
    def host(self) -> "Experience":
        """This experience as it was before :meth:`to`, so that reading it waits for no device."""
        return vars(self).get("_host", self)  # itself is not stored: the cycle would outlive the step

    def per_token(self, values: Tensor) -> Tensor:
        """Repeat values [B] of the samples over the tokens of this rank's sequences: [T]."""
        return expand(self.ranks.own(values), self.cu_seqlens, self.num_tokens)

    def _map(self, change: Any) -> "Experience":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self,
            **{f.name: change(f.metadata["axis"], values[f.name]) for f in fields(self) if values[f.name] is not None})

    def to(self, device: torch.device | str) -> "Experience":
        """Copy the experience with its tensors on ``device`` (media stay keys), and what the host knows of it."""
        moved = self._map(lambda axis, value: value if axis == "list" else upload(value, device))
        vars(moved).update(lens=self.lens, actions=upload(self.actions, device), _host=self.host)
        return moved

    def tokens_of(self, indices: list[int]) -> Tensor:
        """Return the positions in [T] of the tokens of the sequences ``indices``, in that order."""
        index = torch.tensor(indices, dtype=torch.long, device=self.token_ids.device)
        starts, lens = self.cu_seqlens[index].long(), self.seq_lens[index].long()
        before = lens.cumsum(0) - lens
        # token i of the result is token (i - its new start + its old start) of this experience
        return torch.arange(int(lens.sum()), device=index.device) + torch.repeat_interleave(starts - before, lens)

    def select(self, indices: list[int]) -> "Experience":
        """Pack the sequences ``indices``, in that order, into a new Experience."""
        index = torch.tensor(indices, dtype=torch.long, device=self.token_ids.device)
        lens, tokens = self.seq_lens[index].long(), self.tokens_of(indices)
        cu = torch.cat([lens.new_zeros(1), lens.cumsum(0)]).to(self.cu_seqlens.dtype)
        pick = {
            "T": lambda v: v[tokens], "B": lambda v: v[index], "cu": lambda v: cu, "list":
            lambda v: [v[i] for i in indices]
        }
        return self._map(lambda axis, value: pick[axis](value))

    def split(self, parts: list[list[int]]) -> list["Experience"]:
        """Make one Experience per list of sequence indices."""
        return [self.select(part) for part in parts]

    @classmethod
    def cat(cls, parts: list["Experience"]) -> "Experience":
        """Join all sequences of ``parts`` in order. A field is set in all parts that have sequences, or in none."""
        parts = [part for part in parts if part.num_seqs] or parts[:1]
        merged: dict[str, Any] = {}
        for f in fields(cls):
            values = [getattr(part, f.name) for part in parts]
            if all(v is None for v in values):
                continue
            if any(v is None for v in values):
                raise ValueError(f"cannot join experiences: {f.name} is set in some parts only")
            merged[f.name] = _join(f.metadata["axis"], values)
        return cls(**merged)


@dataclass
class RolloutBatch(Experience):
    """Rollout batch of all ranks, as advantages and token selections read it.

    Its [T] fields and ``cu_seqlens`` describe the sequences of this rank, its [B] fields the samples of all ranks.
    """
    ranks: Ranks = field(default=HERE, metadata={"axis": "none"})  # type: ignore[misc]

    def local(self) -> Experience:
        """Return the sequences of this rank, with their own samples only."""
        kept = {f.name: (f.metadata["axis"], vars(self)[f.name]) for f in fields(Experience)}
        values: dict[str, Any] = {
            name: self.ranks.own(value) if axis == "B" and value is not None else value
            for name, (axis, value) in kept.items()
        }
        return Experience(**values)


def _join(axis: str, values: list[Any]) -> Any:
    if axis == "list":
        return [item for value in values for item in value]
    if axis == "cu":
        lens = torch.cat([value.diff() for value in values])
        return torch.cat([lens.new_zeros(1), lens.cumsum(0).to(lens.dtype)])
    return torch.cat(values)
