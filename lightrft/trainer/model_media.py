"""Media of a model: the store that opens them, and the source and the cache that its towers read."""
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lightrft.config.prompt_schema import MediaConfig
from lightrft.datasets.media_store import MediaStore, open_store
from lightrft.models.config_json import media_kinds, token_frames
from lightrft.models.lora import hf_name
from lightrft.models.media_features import FeatureCache
from lightrft.models.packed_model import PackedModel
from lightrft.strategy.base import StrategyBase
from lightrft.strategy.sharding import is_whole
from lightrft.types import MediaSource
from lightrft.utils.errors import UserError


def open_media(path: str, tokenizer: PreTrainedTokenizerBase, cfg: MediaConfig,
               strategy: StrategyBase | None = None) -> MediaStore | None:
    """Open the store of pictures, videos and sounds for the model at ``path``; None if it takes text only. With
    ``strategy``, the ranks, which read the same rows, compare the media that they have read."""
    kinds = media_kinds(path)
    if not kinds:
        return None
    store = open_store(path, tokenizer, cfg, token_frames(path), kinds)
    if strategy is not None:
        store.gather = strategy.all_gather_object
    return store


def feature_cache(cfg: MediaConfig) -> FeatureCache | None:
    """Create the cache that ``--cache_features`` asks for."""
    return FeatureCache(cfg.feature_cache_mib) if cfg.cache_features else None


def connect_media(model: nn.Module, media: MediaSource | None, strategy: StrategyBase,
                  cache: FeatureCache | None = None) -> None:
    """Give ``model``, prepared by ``strategy``, the source of its media and the cache of their features.

    Raises:
        UserError: there is a cache, and the features of the data's media are trained.
    """
    packed = cast(PackedModel, model)
    modality, named = packed.modality, {hf_name(name): weight for name, weight in packed.model.named_parameters()}
    modality.media = media
    read = modality.feature_names(packed.hf_model, named)
    if not all(is_whole(named[name]) for name in read):
        modality.passes = lambda count: int(strategy.all_reduce(torch.tensor(count), "max"))
    if cache is None or not modality.kinds:
        return
    trained = [name for name in read if named[name].requires_grad]
    if trained:
        raise UserError(
            f"--cache_features: {trained[0]} is trained, so the features of media after the projector change at every "
            "step and cannot be cached; add --freeze_prefix visual audio projector (those that the model has), or "
            "drop it")
    modality.cache = cache
