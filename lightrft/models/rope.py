"""Rotary embeddings whose frequencies depend on the length of a sequence: ``longrope`` (Phi-3, Phi-4) and ``dynamic``.

transformers chooses the frequencies of a forward pass by its largest position. A row of packed sequences would have one
choice for all of them, so :class:`LengthRope` asks transformers once for each choice that its sequences need.

While a response grows, the length of its sequence is not known. transformers' own ``generate`` changes the frequencies
of a response on its way, and tokens drawn before the change have other log-probs in a pass over the whole sequence. So
where responses are generated the length is fixed (:func:`fix_length`) to the longest that a sequence may have, as vLLM
does; the trainer of these responses fixes the same.
"""
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightrft.models.attention import PackedLayout
from lightrft.utils.tensors import upload

ORIGINAL = "original_max_position_embeddings"
Choice = tuple[int, ...]  # sequences with equal ones have equal frequencies


class LengthRope(nn.Module):
    """Computes the rotary embedding ``rope`` of transformers with frequencies for the length of each sequence.

    ``fixed``: tokens that every sequence counts as having; 0: as many as it has. The decoder passes the ``layout`` of
    its row before every pass; None: the row is one sequence.
    """

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope
        self.fixed = 0
        self.layout: PackedLayout | None = None

    def choice(self, length: int) -> Choice:
        """Return what the frequencies of a sequence of ``length`` tokens depend on."""
        length = self.fixed or length
        return tuple(max(length, limit) if "dynamic" in kind else int(length > limit)
                     for kind, limit in _limits(self.rope))  # yapf: disable

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return cosine and sine, [1, T, d] each, or what else the family computes of ``position_ids`` [..., T]."""
        lens = self.layout.whole_lens if self.layout is not None and not self.fixed else []
        if len({*map(self.choice, lens)}) < 2:
            last = self.fixed - 1 if self.fixed else position_ids.amax()
            return self._of_length(last, x, position_ids, *args, **kwargs)
        return self._by_choice(lens, x, position_ids, *args, **kwargs)

    def _by_choice(self, lens: list[int], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the tokens of each choice at once, and put them back in their order."""
        assert self.layout is not None, "set before the forward pass of a pack"
        of_choice: dict[Choice, list[int]] = {}
        for number, length in enumerate(lens):
            of_choice.setdefault(self.choice(length), []).append(number)
        tokens = torch.arange(sum(self.layout.lens)).split(self.layout.lens)
        indices = [torch.cat([tokens[number] for number in numbers]) for numbers in of_choice.values()]
        parts = [self._of_length(max(lens[number] for number in numbers) - 1, x,
                                 position_ids.index_select(-1, upload(index, position_ids.device)), *args, **kwargs)
                 for numbers, index in zip(of_choice.values(), indices)]  # yapf: disable
        order = upload(torch.cat(indices).argsort(), position_ids.device)
        return _mapped(lambda *each: torch.cat(each, 1).index_select(1, order), *parts)

    def _of_length(self, last: int | Tensor, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute tokens with the frequencies of a sequence whose last position is ``last``: as one of its tokens.

        Hooks of ``rope`` do not run: ZeRO-3 requires that all ranks call the same modules, and they may need different
        numbers of choices.
        """
        for kind, _ in _limits(self.rope):
            if "dynamic" in kind:  # transformers keeps the frequencies of the longest sequence until a short one
                self.rope.forward(x, torch.zeros_like(position_ids[..., :1]), *args, **kwargs)
        end = torch.zeros_like(position_ids[..., :1]) + last
        extended = torch.cat([position_ids, end], -1)
        return _mapped(lambda out: out[:, :-1], self.rope.forward(x, extended, *args, **kwargs))


def _mapped(function: Any, *outputs: Any) -> Any:
    """Apply ``function`` to tensors, or to those of tuples of them."""
    if isinstance(outputs[0], tuple):
        return tuple(function(*each) for each in zip(*outputs))
    return function(*outputs)


def _limits(rope: nn.Module) -> list[tuple[str, int]]:
    """List the types of ``rope`` that depend on length, as :func:`limits` does."""
    return limits(getattr(rope, "config", None)) if _depends(getattr(rope, "rope_type", "")) else []


def _depends(kinds: Any) -> bool:
    return any("dynamic" in kind or kind == "longrope" for kind in (kinds.values() if isinstance(kinds, dict) else
                                                                    [kinds]) if isinstance(kind, str))  # yapf: disable


def limits(config: Any) -> list[tuple[str, int]]:
    """List the RoPE types of a text ``config`` that depend on length, each with the longest sequence that has the
    frequencies of the short ones."""
    parameters = getattr(config, "rope_parameters", None) or {}
    layers = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    kinds = [(str(each.get("rope_type", "")), each) for each in layers]
    return [(kind, int(config.max_position_embeddings if "dynamic" in kind else each[ORIGINAL]))
            for kind, each in kinds if _depends(kind)]  # yapf: disable


def adapt(body: nn.Module) -> None:
    """Replace the rotary embeddings of the decoder ``body`` whose frequencies depend on length; others stay."""
    if any(True for _ in ropes(body)):
        return
    for module in [*body.modules()]:
        for name, child in [*module.named_children()]:
            if _limits(child):
                setattr(module, name, LengthRope(child))
    if any(True for _ in ropes(body)):
        body.register_forward_pre_hook(_pass_layout, with_kwargs=True)


def _pass_layout(body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for rope in ropes(body):
        rope.layout = kwargs.get("packing")


def ropes(model: nn.Module) -> Iterator[LengthRope]:
    """Iterate over the rotary embeddings of ``model`` that depend on length."""
    return (module for module in model.modules() if isinstance(module, LengthRope))


def choices(model: nn.Module, lens: Iterable[int]) -> list[tuple[Choice, ...]]:
    """Return for sequences of ``lens`` tokens what the frequencies of ``model`` depend on."""
    found = [*ropes(model)]
    return [tuple(rope.choice(length) for rope in found) for length in lens]


def grouped(model: nn.Module, lens: Iterable[int]) -> list[list[int]]:
    """Return the indices of sequences of ``lens`` tokens, those with equal frequencies together: one call of an engine
    without a fixed length is right for each group."""
    groups: dict[tuple[Choice, ...], list[int]] = {}
    for index, choice in enumerate(choices(model, lens)):
        groups.setdefault(choice, []).append(index)
    return [*groups.values()]


def fix_length(model: nn.Module, length: int) -> None:
    """Give all sequences the frequencies of one with ``length`` tokens; 0: each those of its own."""
    for rope in ropes(model):
        rope.fixed = length


@contextmanager
def fixed_length(model: nn.Module, length: int) -> Iterator[None]:
    """Context of :func:`fix_length`."""
    before = [(rope, rope.fixed) for rope in ropes(model)]
    fix_length(model, length)
    try:
        yield
    finally:
        for rope, fixed in before:
            rope.fixed = fixed
