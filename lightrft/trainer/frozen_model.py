"""Second models that are never trained: on the device all the time, or only while they compute."""
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lightrft.config.prompt_schema import MediaConfig
from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.datasets.media_store import open_store
from lightrft.models.config_json import logit_count, media_kinds, token_frames
from lightrft.models.loader import load_actor
from lightrft.models.tokenizer import load_tokenizer
from lightrft.models.vocabulary import tokens_of
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.materialize import Builder
from lightrft.trainer.model_media import connect_media, feature_cache
from lightrft.types import MediaSource
from lightrft.utils.errors import UserError
from lightrft.utils.logging import warn_of_all


def check_inputs(option: str, path: str, policy: str, tokenizer: PreTrainedTokenizerBase,
                 media: MediaSource | None) -> None:
    """Check that the model at ``path``, of ``option``, knows the tokens of the ``policy`` with ``tokenizer``, and reads
    its ``media``.

    Raises:
        UserError: it numbers its tokens otherwise, or has no logit for one of them; or of :func:`check_media`.
    """
    logit_count(path)  # before its tokenizer: a path without a model is named as such, as a plan names it
    own, theirs = tokenizer.get_vocab(), load_tokenizer(path).get_vocab()
    remedy = f"Take a model of the same family as --pretrain {policy}"
    differ = sorted(token for token in own.keys() | theirs.keys() if own.get(token) != theirs.get(token))
    if differ:
        raise UserError(
            f"--{option} {path}: {len(differ)} of its tokens are not those of the trained model (the first: "
            f"{differ[0]!r}; vocabularies of {len(theirs)} and {len(own)}), so their distributions cannot "
            f"be compared. {remedy}")
    check_width(option, path, policy, tokenizer)
    check_media(option, path, policy, tokenizer, media)


def check_width(option: str, path: str, policy: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model at ``path``, of ``option``, has all tokens that the ``policy`` with ``tokenizer`` has.

    Raises:
        UserError: it has fewer.
    """
    width, needed = logit_count(path), min(tokens_of(tokenizer), logit_count(policy))
    if width < needed:  # more tokens than the policy has logits may be in a tokenizer: text models of Gemma-3
        raise UserError(f"--{option} {path}: it has embeddings of {width} tokens, and the vocabulary needs "
                        f"{needed}. Take a model of the same family as --pretrain {policy}, with all of its tokens")


def check_media(option: str, path: str, policy: str, tokenizer: PreTrainedTokenizerBase,
                media: MediaSource | None) -> None:
    """Check that the processor of the model at ``path``, of ``option``, makes of a medium what that of the ``policy``
    does, whose tensors both models get: sizes of pictures and patches, values of pixels, tokens. A folder without a
    processor, of which nothing can be compared, is reported.

    Raises:
        UserError: it makes something else, or the model takes no such media.
    """
    kinds = media.kinds if media is not None else ()
    if not kinds:
        return
    if lacking := sorted({*kinds} - {*media_kinds(path)}):
        raise UserError(f"--{option} {path}: it takes no media of kind {', '.join(lacking)}, which the rows have. Take "
                        f"a model of the same family as --pretrain {policy}")
    try:
        store = open_store(path, tokenizer, MediaConfig(), token_frames(path), kinds)
    except UserError as error:
        warn_of_all(f"--{option} {path}: it is not known whether it reads the media as --pretrain {policy} does: "
                    f"{error}")
        return
    for kind in kinds:
        own, theirs = cast(MediaSource, media).blank(kind), store.blank(kind)
        pairs = {name: (own.tensors.get(name), theirs.tensors.get(name)) for name in own.tensors | theirs.tensors}
        differ = next((name for name, (a, b) in pairs.items() if a is None or b is None or not a.equal(b)), None)
        if differ is not None or own.text != theirs.text:
            raise UserError(
                f"--{option} {path}: its processor makes other {differ or 'tokens'} of media of kind {kind} than that "
                f"of --pretrain {policy}, whose tensors both models get. Take a model whose processor has the same "
                "sizes, patches and normalisation")


def teacher_builder(cfg: PolicyModelConfig, path: str, student: PreTrainedTokenizerBase,
                    media: MediaSource | None) -> Builder:
    """Return what loads the teacher at ``path``, frozen.

    Raises:
        UserError: of :func:`check_inputs`.
    """
    check_inputs("teacher_model", path, str(cfg.pretrain), student, media)
    return partial(load_actor, cfg, path=path, train=False, deferred=True)


def free_memory(device: torch.device) -> None:
    """Give back the memory of models that are no longer referenced."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class FrozenModel:
    """A model without an optimizer.

    Args:
        build: loads it. shard_size: ranks that share one copy, where the strategy shards. offloads: keep it in host
        memory between passes.
    """

    def __init__(self, build: nn.Module | Builder, strategy: StrategyBase, shard_size: int, offloads: bool) -> None:
        self.strategy, self.offloads = strategy, offloads
        self.prepared = strategy.prepare(build, shard_size=shard_size)
        if offloads:
            strategy.offload(self.prepared)

    def connect(self, media: MediaSource | None, data: MediaConfig) -> None:
        """Give the model the source of its media and, where ``data`` asks for one, a cache of their features."""
        connect_media(self.prepared.model, media, self.strategy, feature_cache(data))

    @contextmanager
    def here(self) -> Iterator[nn.Module]:
        """Context in which the model is on the device."""
        if self.offloads:
            self.strategy.reload(self.prepared)
        yield self.prepared.model
        if self.offloads:
            self.strategy.offload(self.prepared)
