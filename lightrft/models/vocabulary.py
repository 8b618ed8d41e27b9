"""Tokens that a model has an embedding for, compared with those of rows and of requests."""
from collections.abc import Iterable, Sequence
from typing import cast

from torch import nn
from transformers import PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from lightrft.models.config_json import logit_count
from lightrft.utils.errors import UserError


def tokens_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of tokens that ids of ``tokenizer`` count, up to the highest; models are padded beyond it."""
    return int(max(tokenizer.get_vocab().values())) + 1


def embeddings_of(model: object, path: str) -> int:
    """Return the number of tokens that ``model`` has embeddings for; one that is not built yet is that of ``path``."""
    if not isinstance(model, nn.Module):
        return logit_count(path)
    return int(cast(PretrainedConfig, model.config).get_text_config().vocab_size)


def check_ids(name: str, ids: Sequence[int], width: int, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Refuse ``ids`` that a model with embeddings of ``width`` tokens does not have.

    Args:
        name: of what has these tokens.
        tokenizer: has made them.

    Raises:
        UserError: names the first such token, both sizes and the remedies.
    """
    if not ids or 0 <= min(ids) <= max(ids) < width:
        return
    token = next(i for i in ids if not 0 <= i < width)
    text, size = ("", "") if tokenizer is None else (f" ({tokenizer.convert_ids_to_tokens(token)!r})",
                                                     f" with its {tokens_of(tokenizer)} tokens")  # yapf: disable
    raise UserError(f"{name} has token {token}{text}, and the model has embeddings of {width} tokens: the tokenizer"
                    f"{size} is not that of the model. Save the model after resize_token_embeddings, or copy its own "
                    "tokenizer files into its folder")


def check_rows(model: object, path: str, tokenizer: PreTrainedTokenizerBase,
               rows: Iterable[tuple[str, Sequence[int]]]) -> None:
    """Refuse rows with a token that a model does not have, as :func:`check_ids` does.

    Args:
        model: the model, or what builds that of ``path``.
        rows: name and tokens of each; not read if the model has all tokens of the tokenizer.
    """
    width = embeddings_of(model, path)
    for name, ids in rows if tokens_of(tokenizer) > width else ():
        check_ids(f"{path!r}: {name}", ids, width, tokenizer)
