"""The batch of the trainer: sequences packed into one row of tokens, with declared fields."""
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightrft.ops.segment import expand, HERE, position_ids, Ranks
from lightrft.types.branches import MediaSpan
from lightrft.types.episodes import Episode
from lightrft.types.fields import check_declared, Field, flatten, Numbers, NUMBERS
from lightrft.utils.play import Shown
from lightrft.utils.tensors import uploads

NAN = math.nan


def _declare(axis: str, dtype: torch.dtype | None = None, **more: Any) -> Any:
    return field(default=None, metadata={"declared": Field(axis, dtype, **more)})


def _per_token(dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return _declare("T", dtype, **more)


def _per_sequence(dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return _declare("B", dtype, **more)


@dataclass
class Batch:
    """B sequences packed into one row of T tokens; index t of every [T] field describes token t.

    ``logprobs[t] = log p(token_t | tokens before)`` and ``values[t]`` is the value of the state in which token t was
    chosen, so nothing is ever shifted; both are 0 where undefined. Masks are bool, True = keep. A field is a tensor of
    the declared axis and type, or None where the run does not have it. ``extra`` holds the numbers that are declared by
    :func:`lightrft.types.fields.number`, by name.

    A sequence is a whole episode, so that every statistic counts episodes: one that forks has its branches one after
    another. Only forward passes tell them apart (:attr:`branches`).

    ``ranks`` are those that hold the sequences of the batch. By default all are here. In the rollout batch as
    advantages and token selections read it, [T] fields and ``cu_seqlens`` describe the sequences of this rank, and [B]
    fields the samples of all ranks.
    """
    token_ids: Tensor = field(metadata={"declared": Field("T", torch.int64, source="token_ids")})
    cu_seqlens: Tensor = field(metadata={"declared": Field("cu", torch.int32)})  # [B + 1], starts with 0, ends with T
    # True on the tokens that the policy drew and learns from
    loss_mask: Tensor = field(metadata={"declared": Field("T", torch.bool, source="drawn")})
    group_ids: Tensor = _per_sequence(torch.int64, source="group_id")  # samples of one prompt share one id
    indices: Tensor = _per_sequence(torch.int64, source="index")  # of the samples in their groups
    sample_ids: Tensor = _per_sequence(torch.int64)  # position in the global rollout batch, by group and index
    rewards: Tensor = _per_sequence()  # after shaping; meaningless where not scored
    scored: Tensor = _per_sequence(torch.bool)
    reward_parts: Tensor = _per_sequence(missing=NAN)  # [B, K], parts before their weights; NaN: does not judge
    part_weights: Tensor = _per_sequence()  # [B, K], the weights of the parts in the sample's reward
    margins: Tensor = _per_sequence()  # by which the reward of the chosen sequence of a pair is to be higher
    labels: Tensor = _per_sequence()  # [B] or [B, K], probability that the sequence, or the chosen one, is good
    step_labels: Tensor = _per_token()  # of the step that a token of the loss ends (of process rewards)
    ref_sums: Tensor = _per_sequence(torch.float64)  # log-probs of the reference, summed over the tokens in the loss
    matched: Tensor = _per_sequence(torch.float64)  # margin of the reference that a pair meets (aot); equal in a pair
    nll_weights: Tensor = _per_sequence(torch.float64)  # of the chosen one's NLL per token (of pairs); equal in a pair
    baseline_rewards: Tensor = _per_sequence(missing=NAN)  # of the prompt's greedy response, shaped alike
    baseline_lengths: Tensor = _per_sequence()  # tokens of that response
    truncated: Tensor = _per_sequence(torch.bool, source="truncated")  # the response hit the length limit
    weight_versions: Tensor = _per_token(torch.int32, source="version")  # -1: the policy did not draw it
    rollout_logprobs: Tensor = _per_token(source="logprobs")
    old_logprobs: Tensor = _per_token()
    ref_logprobs: Tensor = _per_token()
    teacher_logprobs: Tensor = _per_token()
    values: Tensor = _per_token()
    token_rewards: Tensor = _per_token()
    step_rewards: Tensor = _per_token(missing=NAN)  # reward of the step that the token ends, part of the sample's
    advantages: Tensor = _per_token()
    entropies: Tensor = _per_token()  # of the old policy, in nats; set where Config.reads_entropies
    high_entropy_mask: Tensor = _per_token(torch.bool)  # the tokens that alone get a policy gradient; None: all
    selected: Tensor = _per_token(torch.bool)  # what the policy loss chose of the current mini-batch; False elsewhere
    returns: Tensor = _per_token()
    token_weights: Tensor = _per_token()  # of the gradient of a token, which counts as one token all the same
    media: list[tuple[str, ...]] | None = _declare("list", source="joined.media")  # keys, in the order of their tokens
    prompt_lens: list[int] | None = _declare("list", source="joined.prompt_len")
    # behind prompts; None: there none
    media_spans: list[tuple[MediaSpan, ...]] | None = _declare("list", source="joined.media_spans")
    shown: list[tuple[Shown, ...]] | None = _declare("list", source="pictures")  # by environments, among ``media``
    # start and stop, in its sequence, of each prompt behind which an episode goes on (:attr:`Episode.forks`)
    forks: list[tuple[tuple[int, int], ...]] | None = _declare("list", source="forks")
    extra: dict[str, Tensor] = field(default_factory=dict)
    ranks: Ranks = HERE
    before: ClassVar[list[int] | None] = None  # no sequence continues another

    def __post_init__(self) -> None:
        self.extra = Numbers(self.extra)

    @classmethod
    @cache
    def declared(cls) -> dict[str, Field]:
        """Return the declared fields by name, without the numbers in ``extra``."""
        return {f.name: f.metadata["declared"] for f in fields(cls) if "declared" in f.metadata}

    @classmethod
    def of(cls, responses: Sequence[Episode]) -> "Batch":
        """Pack responses on the CPU, with the fields and the numbers that they have."""
        pieces = [response.pieces for response in responses]
        counts = [[len(piece.token_ids) for piece in of_response] for of_response in pieces]
        lens, flat = [*map(sum, counts)], ([*chain.from_iterable(pieces)], [*chain.from_iterable(counts)])
        check_declared(name for response in responses for name in response.extra)
        extra = {name: NUMBERS.get(name).pack_numbers(name, responses, lens) for name in NUMBERS}
        read = {name: declared for name, declared in cls.declared().items() if declared.source}
        values: dict[str, Any] = {name: one.pack_segments(*flat) if one.axis == "T" else one.pack_responses(responses)
                                  for name, one in read.items()}  # yapf: disable
        return cls(cu_seqlens=_boundaries(lens), extra=extra, **values)

    @classmethod
    def pack(cls, token_ids: Iterable[list[int]], loss_mask: Iterable[list[bool]] | None = None,
             **values: Any) -> "Batch":
        """Pack sequences on the CPU.

        Args:
            token_ids: B lists.
            loss_mask: lists of the same lengths; None: no token is in the loss.
            values: further fields.
        """
        rows = [*token_ids]
        cu = _boundaries(map(len, rows))
        mask = torch.zeros(int(cu[-1]), dtype=torch.bool) if loss_mask is None else flatten(loss_mask, torch.bool)
        return cls(flatten(rows, torch.int64), cu, mask, **values)

    @property
    def num_seqs(self) -> int:
        """Number of sequences, B."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.token_ids)

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Group and index of each sample."""
        return [*zip(self.group_ids.tolist(), self.indices.tolist())]

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
    def spans(self) -> list[list[MediaSpan]]:
        """Tokens of each sequence that may stand for media: its prompt, and what is behind it with media. Other tokens
        of media are text, such as those that a policy draws."""
        prompts, media = self.prompt_lens or [0] * self.num_seqs, self.media or [()] * self.num_seqs
        return [[MediaSpan(0, length, keys[:len(keys) - sum(len(span.keys) for span in later)]), *later]
                for length, keys, later in zip(prompts, media, self.media_spans or [()] * self.num_seqs)]

    @staticmethod
    def with_spans(spans: Sequence[list[MediaSpan]]) -> dict[str, Any]:
        """Return the fields of a batch whose :attr:`spans` are ``spans``."""
        return {"media": [tuple(key for span in some for key in span.keys) for some in spans],
                "prompt_lens": [some[0].stop for some in spans],
                "media_spans": [tuple(some[1:]) for some in spans]}  # yapf: disable

    @property
    def branches(self) -> "Batch":
        """Row of the same tokens as forward passes read it: each branch of an episode that forks is a sequence there,
        which sees no other. Of the samples, the sequences of this batch, nothing is left then."""
        host = self.host
        if not any(host.forks or ()):
            return self
        cut = [branch for length, spans, forks in zip(host.lens, host.spans, host.forks or ())
               for branch in _branches(length, spans, forks)]  # yapf: disable
        apart = Batch(host.token_ids, _boundaries(length for length, _ in cut), host.loss_mask,
                      weight_versions=host.weight_versions, **Batch.with_spans([spans for _, spans in cut]))
        return apart.to(self.token_ids.device)

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
    def host(self) -> "Batch":
        """This batch as it was before :meth:`to`, so that reading it waits for no device."""
        return vars(self).get("_host", self)  # itself is not stored: the cycle would outlive the step

    def per_token(self, values: Tensor) -> Tensor:
        """Repeat values [B] of the samples over the tokens of this rank's sequences: [T]."""
        return expand(self.ranks.own(values), self.cu_seqlens, self.num_tokens)

    def _map(self, change: Callable[[Field, Any], Any]) -> "Batch":
        """Return a batch with ``change`` of every value that is set."""
        values = {
            name: change(declared,
                         vars(self)[name]) for name, declared in self.declared().items() if vars(self)[name] is not None
        }
        return replace(self, **values, extra={name: change(NUMBERS.get(name), v) for name, v in self.extra.items()})

    def to(self, device: torch.device | str) -> "Batch":
        """Copy the batch with its tensors on ``device`` (media stay keys), and what the host knows of it."""
        tensors = {name: vars(self)[name] for name in self.declared() if isinstance(vars(self)[name], Tensor)}
        moved: dict[str, Any] = uploads(tensors | {"actions": self.actions}, device)
        actions = moved.pop("actions")
        batch = replace(self, **moved, extra=uploads(self.extra, device))
        vars(batch).update(lens=self.lens, actions=actions, _host=self.host)
        return batch

    def tokens_of(self, indices: list[int]) -> Tensor:
        """Return the positions in [T] of the tokens of the sequences ``indices``, in that order."""
        index = torch.tensor(indices, dtype=torch.long, device=self.token_ids.device)
        starts, lens = self.cu_seqlens[index].long(), self.seq_lens[index].long()
        before = lens.cumsum(0) - lens
        # token i of the result is token (i - its new start + its old start) of this batch
        return torch.arange(int(lens.sum()), device=index.device) + torch.repeat_interleave(starts - before, lens)

    def select(self, indices: list[int]) -> "Batch":
        """Pack the sequences ``indices``, in that order, into a new batch."""
        index = torch.tensor(indices, dtype=torch.long, device=self.token_ids.device)
        lens, tokens = self.seq_lens[index].long(), self.tokens_of(indices)
        cu = torch.cat([lens.new_zeros(1), lens.cumsum(0)]).to(self.cu_seqlens.dtype)
        pick: dict[str, Callable[[Any], Any]] = {
            "T": lambda v: v[tokens], "B": lambda v: v[index], "cu": lambda v: cu, "list":
            lambda v: [v[i] for i in indices]
        }
        return self._map(lambda declared, value: pick[declared.axis](value))

    def split(self, groups: list[list[int]]) -> list["Batch"]:
        """Make one batch per list of sequence indices."""
        return [self.select(group) for group in groups]

    @classmethod
    def cat(cls, batches: Sequence["Batch"]) -> "Batch":
        """Join all sequences of ``batches`` in order. A field is set in all batches that have sequences, or in none;
        where it is missing in some, they get the value that is declared for that.

        Raises:
            ValueError: none is declared.
        """
        batches = [batch for batch in batches if batch.num_seqs] or batches[:1]
        if len(batches) == 1:
            return batches[0]
        values = {name: _join(name, declared, batches, [vars(batch)[name] for batch in batches])
                  for name, declared in cls.declared().items()}  # yapf: disable
        names = dict.fromkeys(name for batch in batches for name in batch.extra)
        extra = {name: _join(name, NUMBERS.get(name), batches, [batch.extra.get(name) for batch in batches])
                 for name in names}  # yapf: disable
        return cls(**values, extra=extra)

    def count(self, declared: Field) -> int:
        """Return the number of values of a field: B or T."""
        return self.num_tokens if declared.axis == "T" else self.num_seqs

    def local(self) -> "Batch":
        """Return the sequences of this rank, with their own samples only."""
        local = self._map(lambda declared, value: self.ranks.own(value) if declared.axis == "B" else value)
        return replace(local, ranks=HERE)


def _boundaries(lens: Iterable[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def _branches(length: int, spans: list[MediaSpan], forks: tuple[tuple[int, int],
                                                                ...]) -> Iterator[tuple[int, list[MediaSpan]]]:
    """Yield the length and the ``spans`` of each branch of a sequence of ``length`` tokens."""
    prompts, ends = [(0, spans[0].stop), *forks], [*(start for start, _ in forks), length]
    keys = {span.start: span.keys for span in spans}  # a prompt without media has none
    for (start, stop), end in zip(prompts, ends):
        behind = [span for span in spans if stop <= span.start < end]
        own = [MediaSpan(start, stop, keys.get(start, ())), *behind]
        yield end - start, [span._replace(start=span.start - start, stop=span.stop - start) for span in own]


def _join(name: str, declared: Field, batches: Sequence[Batch], values: list[Any]) -> Any:
    """Join the values of the field ``name`` of ``batches``; None where no batch has it."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    if len(present) < len(values):
        if declared.missing is None:
            raise ValueError(f"cannot join batches: {name} is set in some parts only")
        shape = present[0].shape[1:]
        values = [
            declared.blank(batch.count(declared), *shape) if v is None else v for batch, v in zip(batches, values)
        ]
    return declared.cat(values)
