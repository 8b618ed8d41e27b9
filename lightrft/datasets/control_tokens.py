"""Control tokens of a chat template, and texts of others in which there are none."""
import re
import unicodedata
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from lightrft.datasets.rendering import Renderer

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_KEPT = 32  # texts: roles and names come again and again, and every answer twice


class ControlTokens:
    """Tokens that a chat template or a call of a tool is made of: special ones, and added ones written as marks."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer, self.tokenizer = renderer, renderer.tokenizer
        self._neutral = lru_cache(_KEPT)(self._made_neutral)

    def neutral(self, text: str) -> str:
        """Return a text that has no such token: a blank parts their marks."""
        return self._neutral(text)

    def _made_neutral(self, text: str) -> str:
        parted = self._parted(text)
        if not self._holds(parted):
            return parted
        parted = self._parted(unicodedata.normalize("NFKC", text))  # so does the tokenizer before it looks for them
        return re.sub(r"\W", " ", parted) if self._holds(parted) else parted

    def _holds(self, text: str) -> bool:
        (ids, ) = self.renderer.encode_inside([text])
        return not self._ids.isdisjoint(ids)

    def _parted(self, text: str) -> str:
        while self._marks.search(text):
            text = self._marks.sub(lambda match: f"{match[0][0]} {match[0][1:]}" if match[0][1:] else " ", text)
        return text

    @cached_property
    def _texts(self) -> dict[int, str]:
        added = {number: token.content for number, token in self.tokenizer.added_tokens_decoder.items()
                 if token.special or re.fullmatch(r"[<\[].*[>\]]", token.content)}  # yapf: disable
        special = zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens)
        return added | {number: token for number, token in special if number is not None}

    @cached_property
    def _ids(self) -> set[int]:
        return {*self._texts} - {self.tokenizer.unk_token_id}

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        tokens = {token for token in self._texts.values() if token.strip()}
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Return the special tokens, one of which ends each turn of a chat, and none of which is inside of a text."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | {number for number in tokenizer.all_special_ids if number is not None})


def special_texts(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Return the texts of :func:`special_ids`."""
    return [str(token) for token in tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer)))]
