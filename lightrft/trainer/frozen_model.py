"""Second models that are never trained: on the device all the time, or only while they compute."""
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lightrft.config.prompt_schema import MediaConfig
from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.models.loader import load_actor, logit_count
from lightrft.models.tokenizer import load_tokenizer
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.materialize import Builder
from lightrft.trainer.model_media import connect_media, feature_cache
from lightrft.types import MediaSource
from lightrft.utils.errors import UserError


def check_tokens(option: str, path: str, policy: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model at ``path``, named by ``option``, has the tokens of ``policy``, as ``tokenizer`` numbers
    them.

    Raises:
        UserError: its token ids differ, or it has no logit for one of them.
    """
    own, theirs = tokenizer.get_vocab(), load_tokenizer(path).get_vocab()
    remedy = f"Take a model of the same family as --pretrain {policy}"
    differ = sorted(token for token in own.keys() | theirs.keys() if own.get(token) != theirs.get(token))
    if differ:
        raise UserError(
            f"--{option} {path}: {len(differ)} of its tokens are not those of the trained model (the first: "
            f"{differ[0]!r}; vocabularies of {len(theirs)} and {len(own)}), so their distributions cannot "
            f"be compared. {remedy}")
    width, needed = logit_count(path), min(max(own.values()) + 1, logit_count(policy))
    if width < needed:  # more tokens than the policy has logits may be in a tokenizer: text models of Gemma-3
        raise UserError(f"--{option} {path}: it has {width} logits, and the vocabulary needs {needed}. {remedy}, with "
                        "logits for all tokens")


def teacher_builder(cfg: PolicyModelConfig, path: str, student: PreTrainedTokenizerBase) -> Builder:
    """Return what loads the teacher at ``path``, frozen.

    Raises:
        UserError: of :func:`check_tokens`.
    """
    check_tokens("teacher_model", path, str(cfg.pretrain), student)
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
