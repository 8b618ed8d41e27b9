"""Texts of turns, for forms of calls that are read from them."""
import re

from transformers import PreTrainedTokenizerBase

from lightrft.datasets.control_tokens import special_ids

_THOUGHTS = re.compile(r"<think>(.*?)</think>\s*", re.DOTALL)


class TurnTexts:
    """Texts of turns; the special tokens of the tokenizer are looked up once, and not for every turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.ends = tokenizer, special_ids(tokenizer)

    def text(self, ids: list[int]) -> str:
        """Return the text of a turn without its end token."""
        body = ids[:-1] if ids and ids[-1] in self.ends else ids
        return str(self.tokenizer.decode(body, skip_special_tokens=False))

    def parted(self, ids: list[int]) -> tuple[str | None, str]:
        """Return the thoughts that a turn begins with, between ``<think>`` and ``</think>``, and its other text."""
        whole = self.text(ids).strip()
        thoughts = _THOUGHTS.match(whole)
        return (thoughts[1].strip(), whole[thoughts.end():]) if thoughts else (None, whole)
