"""Texts of tokens behind a context: decoded alone, a text loses what its tokenizer removes from the start of one."""
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_UNFINISHED = "\ufffd"  # bytes that are no whole character
_LONGEST = 16  # tokens of a context that are read, at most: one is enough unless it is a part of a character


def decode_behind(tokenizer: "PreTrainedTokenizerBase", pairs: Iterable[tuple[Sequence[int],
                                                                              Sequence[int]]]) -> list[str]:
    """Return the text that the tokens of each pair (context, tokens) add to their context, with special tokens.

    A tokenizer of the Metaspace kind removes a blank at the start of a text; behind a context it stays. Without a
    context, or behind one that does not end with a whole character, the tokens are decoded alone.
    """
    ends: dict[tuple[int, ...], tuple[list[int], str]] = {}  # the responses of a group share their prompt
    keyed = [(tuple(context[-_LONGEST:]), list(tokens)) for context, tokens in pairs]
    for context, _ in keyed:
        if context not in ends:
            ends[context] = _end(tokenizer, context)
    texts = _decode(tokenizer, [ends[context][0] + tokens for context, tokens in keyed])
    return [text.removeprefix(ends[context][1]) for (context, _), text in zip(keyed, texts)]


def _end(tokenizer: "PreTrainedTokenizerBase", context: Sequence[int]) -> tuple[list[int], str]:
    """Return the fewest last tokens of a context that are whole characters, and their text."""
    for size in range(1, len(context) + 1):
        ids = list(context[-size:])
        text, = _decode(tokenizer, [ids])
        if _UNFINISHED not in text:
            return ids, text
    return [], ""


def _decode(tokenizer: "PreTrainedTokenizerBase", rows: list[list[int]]) -> list[str]:
    return tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)
