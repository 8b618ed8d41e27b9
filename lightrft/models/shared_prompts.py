"""Shared prompts: a prompt of several sequences of a micro-batch is forwarded once.

The row of a forward pass holds such a prompt as a separate segment, followed by the rest of each sequence. Outputs are
read by the tokens of the sequences, so no other module depends on the layout of the row.
"""
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lightrft.ops.segment import expand, position_ids
from lightrft.types import Experience, MediaSpan
from lightrft.utils.tensors import upload


@dataclass
class SegmentRow(Experience):
    """Row of segments: token ids, media, their spans and lengths of prompts as of sequences; ``before``: the segment
    that each one continues, which itself continues none; -1: none."""
    before: list[int] | None = field(default=None, metadata={"axis": "list"})  # type: ignore[misc]

    @property
    def positions(self) -> Tensor:
        """Override :attr:`Experience.positions`: a segment counts on from the one before it."""
        first = torch.tensor([self.lens[number] if number >= 0 else 0 for number in self.before or ()])
        return super().positions + expand(upload(first, self.token_ids.device), self.cu_seqlens, self.num_tokens)


class ForwardRow(NamedTuple):
    """Row of tokens that a forward pass computes for some sequences, and ``places`` (int64 [T], on the host): where in
    the row each token of the sequences is; None: the row is that of the sequences."""
    row: Experience
    places: Tensor | None = None


def forward_row(exp: Experience, share: bool = True, choices: Sequence[Hashable] = ()) -> ForwardRow:
    """Find the prompts that sequences of ``exp`` share: equal tokens and equal media, whatever their group.

    Args:
        share: False: every sequence keeps its own copy.
        choices: one per sequence; only sequences with equal ones share a prompt. Empty: all are equal.
    """
    host = exp.host
    alike = _alike(host, choices or [()] * host.num_seqs) if share else []
    if len(alike) == (host.num_seqs if share else 0):
        return ForwardRow(exp)
    row, heads, tails, shared = _segments(host, alike)
    index = position_ids(host.cu_seqlens, host.num_tokens)
    index += torch.where(index < expand(shared, host.cu_seqlens), expand(heads, host.cu_seqlens),
                         expand(tails - shared, host.cu_seqlens))
    row.token_ids = row.token_ids.index_put((index, ), host.token_ids)  # copies of a prompt are equal
    return ForwardRow(row.to(exp.token_ids.device), index)


def _alike(host: Experience, choices: Sequence[Hashable]) -> list[list[int]]:
    """Group sequences with the same prompt and the same choice, in the order of the first of each group."""
    cu, ids = host.cu_seqlens.tolist(), host.token_ids.cpu().numpy()
    media = [spans[0].keys for spans in host.spans]
    groups: dict[tuple[bytes | int, tuple[str, ...], Hashable], list[int]] = {}
    for number, (start, prompt) in enumerate(zip(cu, host.prompt_lens or [0] * host.num_seqs)):
        same = ids[start:start + prompt].tobytes() if prompt else number
        groups.setdefault((same, media[number], choices[number]), []).append(number)
    return list(groups.values())


def _segments(host: Experience, alike: list[list[int]]) -> tuple[SegmentRow, Tensor, Tensor, Tensor]:
    """Lay out segments, still without token ids.

    Return for each sequence also where its prompt and what follows start in the row, and the tokens of a prompt that it
    shares (0: none; it is then a segment as a whole).
    """
    spans = host.spans
    segments: list[tuple[int, int, list[MediaSpan]]] = []  # length, the one before, what may have media
    places, end = torch.zeros(3, host.num_seqs, dtype=torch.long), 0
    for group in alike:
        head, shared = end, spans[group[0]][0].stop if len(group) > 1 else 0
        if shared:
            segments.append((shared, -1, spans[group[0]][:1]))
            end += shared
        before = len(segments) - 1
        for number in group:
            places[:, number] = torch.tensor([head, end, shared])
            if length := host.lens[number] - shared:
                segments.append((length, before, _behind(shared, spans[number])) if shared else
                                (length, -1, spans[number]))  # yapf: disable
            end += length
    return _row(segments), *places


def _behind(shared: int, spans: list[MediaSpan]) -> list[MediaSpan]:
    """Return the spans of what follows a prompt of ``shared`` tokens: of a sequence with an empty prompt."""
    later = [span._replace(start=span.start - shared, stop=span.stop - shared) for span in spans[1:]]
    return [MediaSpan(0, 0, ()), *later]


def _row(segments: list[tuple[int, int, list[MediaSpan]]]) -> SegmentRow:
    lens, before, spans = zip(*segments)
    cu, ids = torch.tensor([0, *lens]).cumsum(0).int(), torch.zeros(sum(lens), dtype=torch.long)
    return SegmentRow(ids, cu, torch.zeros_like(ids, dtype=torch.bool), before=[*before],
                      **Experience.with_spans(spans))
