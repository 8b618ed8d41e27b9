"""Differences between model families and modalities: the class that loads them, the features of media, the positions of
tokens, the body and the head. Everything else in ``models`` is the same for all.

All vision and audio families take one path: the features of the unique media of a micro-batch replace token embeddings
by index, then only the text decoder runs. Hugging Face's own ``forward`` places them by token id, and fails once a
policy samples a media token.
"""
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM, PretrainedConfig,
                          PreTrainedModel)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from lightrft.models import dropped_keywords, rope, stateful
from lightrft.models.attention import PACKED, PackedLayout
from lightrft.models.media_features import FeatureCache, keys_of, MediaPlaces
from lightrft.models.towers import (config_value, Family, Features, least_frames, least_grid, least_picture,
                                    least_placed, of_frames, of_grids, of_omni_sounds, of_pictures, of_qwen2_audio,
                                    of_several, of_tile_rows, of_tiles, of_levels, of_windows, OMNI_PATH, part_of,
                                    per_layer_inputs, pooled, rope_of_grids, rope_of_omni, Tower, video_of_frames)
from lightrft.ops.logprobs import full_logits
from lightrft.types import Experience, MediaSource, MediaTensors
from lightrft.utils.errors import UserError
from lightrft.utils.tensors import upload

POSITIONS_KEPT = 4096  # prompts whose positions are kept
_MULTIPLIED = {"hyperclovax"}  # families that multiply logits by ``logits_scaling``


@dataclass(frozen=True)
class Head:
    """The output layer: raw = scale * hidden @ weight.T + bias; logits = soft_cap * tanh(raw / soft_cap), 0: raw."""
    weight: Tensor
    bias: Tensor | None
    scale: float
    soft_cap: float


def _scale(config: PretrainedConfig) -> float:
    """Factor of the logits of a family, by its name in the config of those that have one."""
    scaling = float(config_value(config, "logits_scaling", 1.0))  # Granite divides by it
    factors = (float(config_value(config, name, 1.0)) for name in ("logit_scale", "lm_head_multiplier"))
    return prod(factors) * (scaling if config.model_type in _MULTIPLIED else 1 / scaling)


class ActorModality:
    """Text modality, and the base class of :class:`MediaModality`.

    The trainer sets ``media``, the ``cache`` of the features of frozen towers, and, where ranks divide the towers and
    run them together, ``passes``, the number of passes of a tower on all ranks from that on one. ``tokens``: id of the
    token that stands for a feature, by kind of media.
    """
    tokens: Mapping[str, int] = {}
    auto_class: Any = AutoModelForCausalLM
    media: MediaSource | None = None
    cache: FeatureCache | None = None
    passes: Callable[[int], int] | None = None

    @property
    def kinds(self) -> list[str]:
        """Kinds of media that the data hold and the model takes."""
        return []

    @property
    def both_ways(self) -> bool:
        """True if the tokens of a picture attend to each other in both directions."""
        return False

    def of_a_copy(self) -> "ActorModality":
        """Return the modality for a whole copy of the model, whose passes need not meet those of other ranks."""
        found = copy(self)
        found.passes = None
        return found

    def inputs(self, exp: Experience, hf: PreTrainedModel) -> dict[str, Any]:
        """Keyword arguments of one packed forward of the decoder body of ``hf``."""
        if exp.media and any(exp.media):
            raise UserError("these samples carry images, video or audio, and the model takes text only")
        return self._packed(exp)

    def _packed(self, exp: Experience) -> dict[str, Any]:
        layout = PackedLayout.build(exp.cu_seqlens, exp.lens, exp.before)
        return {
            "input_ids": exp.token_ids[None], "position_ids": exp.positions[None], "attention_mask": None, "use_cache":
            False, "packing": layout
        }

    def attention(self, config: PretrainedConfig) -> str | dict[str, str]:
        """``attn_implementation`` of the model of ``config``."""
        return PACKED

    def adapt(self, hf: PreTrainedModel) -> None:
        """Apply changes that loading ``hf`` has no option for."""
        rope.adapt(self.body(hf))
        dropped_keywords.adapt(self.body(hf))
        stateful.adapt(self.body(hf))

    def body(self, hf: PreTrainedModel) -> nn.Module:
        """The decoder without its head: its output has ``last_hidden_state`` [1, T, H]."""
        return hf.get_decoder()

    def head(self, hf: PreTrainedModel) -> Head:
        """The head, read again on every forward because sharding swaps parameters."""
        layer, config = hf.get_output_embeddings(), hf.config.get_text_config()
        return Head(layer.weight, getattr(layer, "bias", None), _scale(config),
                    float(config_value(config, "final_logit_softcapping", 0.0)))

    def parts(self, hf: PreTrainedModel, names: Iterable[str]) -> dict[str, list[str]]:
        """Sort the ``names`` of parameters of ``hf`` by the part of the model that users call "language"."""
        own = [
            f"{name}." for name, module in hf.named_modules() if module in (self.body(hf), hf.get_output_embeddings())
        ]
        return {"language": [name for name in names if name.startswith(tuple(own))]}

    def prompt_positions(self, hf: PreTrainedModel, ids: list[int], keys: tuple[str, ...]) -> Tensor | None:
        """Positions [3, L] in time, height and width of the tokens of a prompt with media; None: their index."""
        return None

    def prompt_places(self, ids: list[int], kind: str) -> list[int]:
        """Indices of the tokens of a prompt that stand for media of ``kind``."""
        return []

    def tower_inputs(self, medium: MediaTensors) -> dict[str, Tensor]:
        """Tensors of a medium that its tower reads, the pixels or the spectrum first."""
        return {}

    def feature_names(self, hf: PreTrainedModel, names: Iterable[str]) -> list[str]:
        """Return those of the ``names`` of parameters of ``hf`` from which the features of the data's media come."""
        return []

    def logits(self, hf: PreTrainedModel, keep: Tensor | int, **inputs: Any) -> Tensor:
        """Logits [k, V] of the tokens ``keep`` (0: all) of one forward, for an engine; no gradient."""
        return hf(**inputs, logits_to_keep=keep).logits[0]


class MediaModality(ActorModality):
    """Modality of vision and audio models; their differences are in the row of the family.

    ``causal_pictures``: attention is causal even within a picture of a family with ``blocks``; set if the engine
    computes that, because the trainer must compute the same.
    """
    causal_pictures = False

    def __init__(self, family: Family, config: PretrainedConfig) -> None:
        self.family = family
        seen = config_value(config.get_text_config(), "use_bidirectional_attention", "")
        self.blocks = family.blocks if family.blocks != "sliding" or seen == "vision" else ""
        self.places = MediaPlaces(family.towers, config)
        self.tokens = self.places.tokens
        sees = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        self.auto_class = AutoModelForImageTextToText if sees else AutoModelForMultimodalLM
        self._rope = lru_cache(POSITIONS_KEPT)(self._rope_of)

    def attention(self, config: PretrainedConfig) -> dict[str, str]:
        """Only the decoder is packed; a tower sees one medium at a time."""
        return {name: PACKED if name == "text_config" else "sdpa" for name in config.sub_configs}

    def adapt(self, hf: PreTrainedModel) -> None:
        """Extend :meth:`ActorModality.adapt`: towers that attend in segments do so in one call per layer."""
        super().adapt(hf)
        for tower in self.family.towers.values():
            tower.adapt(hf)

    def prompt_positions(self, hf: PreTrainedModel, ids: list[int], keys: tuple[str, ...]) -> Tensor | None:
        """Compute the positions [3, L] of a family with M-RoPE."""
        return None if self.family.rope is None else self._rope(hf, tuple(ids), keys)[0]

    @property
    def kinds(self) -> list[str]:
        """Kinds of media that the data hold; every pass goes through their towers, or sharded ranks would not meet."""
        return [kind for kind in self.tokens if self.media is not None and kind in self.media.kinds]

    @property
    def both_ways(self) -> bool:
        """Return True if the tokens of a picture see those after them."""
        return bool(self.blocks) and not self.causal_pictures

    def inputs(self, exp: Experience, hf: PreTrainedModel) -> dict[str, Any]:
        """Override :meth:`ActorModality.inputs`: embeddings in place of tokens, and the family's positions."""
        kinds, keys = self.kinds, [key for sequence in exp.media or () for key in sequence]
        if any(key.partition(":")[0] not in kinds for key in keys):
            raise UserError(f"these samples carry media ({keys[0]}, ...) that {type(hf).__name__} does not take, or no "
                            "source of media was given")
        plain = self._packed(exp)
        if not kinds:
            return plain
        ids = plain.pop("input_ids")[0]
        embeddings, extra = self._with_media(hf.get_input_embeddings()(ids), exp, hf, kinds)
        if self.family.rope is not None and keys:
            plain["position_ids"] = upload(self._positions(exp, hf), exp.token_ids.device)
        if keys and self.both_ways:
            plain["packing"].blocks = self.places.blocks(exp, kinds)
            plain["packing"].blocks_in_windows = self.blocks == "sliding"
        if self.family.layers is not None:
            extra |= self.family.layers(hf, ids, torch.cat([self.places.of(exp, kind) for kind in kinds]))
        return plain | {"inputs_embeds": embeddings[None]} | extra

    def _with_media(self, embeddings: Tensor, exp: Experience, hf: PreTrainedModel,
                    kinds: list[str]) -> tuple[Tensor, dict[str, Any]]:
        """Put the features of every medium at the indices of its tokens.

        Of a kind without any, those of a blank one, if it is needed, are multiplied by 0.
        """
        rows, blanks = self._rows(exp, hf, kinds)
        embeddings = embeddings + 0 * sum(blanks) if blanks else embeddings
        where: list[Tensor] = []
        levels: list[list[Tensor]] = []
        for group in self.places.groups(kinds):
            of_sequence = keys_of(exp, group)
            if any(of_sequence):
                found = self.places.of(exp, group[0])
                self.places.check(found, exp, group, of_sequence, {key: len(row[0]) for key, row in rows.items()})
                joined = map(torch.cat, zip(*(rows[key] for some in of_sequence for key in some)))
                places, first, *deeper = (upload(one, embeddings.device) for one in (found, *joined))
                embeddings = embeddings.index_put((places, ), first.to(embeddings.dtype))
                where.append(places)
                levels.append(deeper)
        return embeddings, of_levels(len(embeddings), where, levels)

    def _rows(self, exp: Experience, hf: PreTrainedModel,
              kinds: list[str]) -> tuple[dict[str, tuple[Tensor, ...]], list[Tensor]]:
        """Features of every unique medium by key, those of deeper layers last; and sums of those of blanks, which take
        the part of a kind without media where every pass goes through its tower."""
        rows: dict[str, tuple[Tensor, ...]] = {}
        blanks: list[Tensor] = []
        for kind in kinds:
            keys = list(dict.fromkeys(key for some in keys_of(exp, (kind, )) for key in some))
            if keys or self._all_pass(hf):
                found = self._features(hf, kind, keys)
                parts = list(zip(found.each, *found.levels))
                rows |= zip(keys, parts)
                blanks += [] if keys else [one.sum() for some in parts for one in some]
        return rows, blanks

    def _all_pass(self, hf: PreTrainedModel) -> bool:
        """True if every pass goes through the towers: ranks run them together, or the step updates their weights, which
        then need a gradient."""
        trained = (name for name, weight in hf.named_parameters() if weight.requires_grad)
        return self.passes is not None or torch.is_grad_enabled() and bool(self.feature_names(hf, trained))

    def _features(self, hf: PreTrainedModel, kind: str, keys: list[str]) -> Features:
        """Features of the media ``keys``, in one pass of the tower, or from the cache; without keys of a blank one,
        which the cache does not need."""
        tower = self.family.towers[kind]
        if self.cache is None:
            found = [self._medium(hf, kind, key) for key in keys] or [self._medium(hf, kind, None)]
            return tower.of(hf, kind, found)
        return self.cache.features(keys, lambda key: tower.of(hf, kind, [self._medium(hf, kind, key)]), self.passes
                                   or int)

    def _medium(self, hf: PreTrainedModel, kind: str, key: str | None) -> MediaTensors:
        """Tensors of the medium ``key``; None: of a blank one."""
        return self.source.tensors(key) if key else self.family.towers[kind].least_of(hf, self.source.blank(kind))

    def parts(self, hf: PreTrainedModel, names: Iterable[str]) -> dict[str, list[str]]:
        """Extend :meth:`ActorModality.parts`: towers ("visual", "audio"), and the layers between them and the decoder
        ("projector"), which are inside the tower in some families."""
        names = list(names)
        found = super().parts(hf, names)
        for part, path in self.family.paths.items():
            own = [name for name in names if name.startswith(path)]
            found |= {part: own} if own or part not in self.family.unused else {}
        sorted_in = {name for part in found.values() for name in part}
        found["projector"] = [name for name in names if name not in sorted_in or "merger" in name]
        return found

    def feature_names(self, hf: PreTrainedModel, names: Iterable[str]) -> list[str]:
        """Return the parameters of the towers of the data's media, and of the projectors."""
        parts = self.parts(hf, names)
        read = {part_of(kind) for kind in self.kinds}
        return [name for part in sorted(read) for name in parts[part]] + (parts["projector"] if read else [])

    @property
    def source(self) -> MediaSource:
        """The source of media; set wherever there are any."""
        if self.media is None:
            raise ValueError("the modality has no source of media")
        return self.media

    def prompt_places(self, ids: list[int], kind: str) -> list[int]:
        """Return the indices of the tokens that the features of a kind of media replace."""
        return self.places.of_prompt(ids, kind)

    def tower_inputs(self, medium: MediaTensors) -> dict[str, Tensor]:
        """Return what the tower of a medium's kind reads."""
        return self.family.towers[medium.kind].inputs(medium)

    def _positions(self, exp: Experience, hf: PreTrainedModel) -> Tensor:
        """Positions [4, 1, T] of M-RoPE: the index in the sequence, and time, height and width.

        What follows tokens with media continues on all axes after the largest position of these.
        """
        host, shifts = exp.host, list[int]()  # what the end of each sequence adds to its index
        tokens, positions = host.token_ids.tolist(), host.positions.expand(4, -1).clone()
        before = host.before or [-1] * host.num_seqs
        for first, length, spans, prefix in zip(host.cu_seqlens.tolist(), host.lens, host.spans, before):
            shifts.append(shifts[prefix] if prefix >= 0 else 0)
            positions[1:, first:first + length] += shifts[-1]
            for start, stop, keys in (span for span in spans if span.keys):
                found, shift = self._rope(hf, tuple(tokens[first + start:first + stop]), keys)
                positions[1:, first + start:first + stop] += found - torch.arange(stop - start)
                positions[1:, first + stop:first + length] += shift
                shifts[-1] += shift
        return positions[:, None]

    def _rope_of(self, hf: PreTrainedModel, ids: tuple[int, ...], keys: tuple[str, ...]) -> tuple[Tensor, int]:
        """Positions [3, L] of a prompt, or of other tokens with media as if they were one, and what follows them adds
        to its index on all axes."""
        tokens = torch.tensor(ids)
        one = torch.tensor([0, len(ids)])
        kinds = sum((i * self.places.marked(tokens, kind, one) for i, kind in enumerate(("image", "video"), 1)
                     if kind in self.tokens), torch.zeros_like(tokens))  # yapf: disable
        rope: Any = self.family.rope
        found = rope(hf, tokens, kinds, [self.source.tensors(key) for key in keys])
        return found, int(found.max()) + 1 - len(ids)

    def logits(self, hf: PreTrainedModel, keep: Tensor | int, **inputs: Any) -> Tensor:
        """Override :meth:`ActorModality.logits`: the head on the decoder, past Hugging Face's merging of media."""
        hidden, head = self.body(hf)(**inputs).last_hidden_state[0], self.head(hf)
        hidden = hidden[keep] if isinstance(keep, Tensor) else hidden
        raw = full_logits(hidden * head.scale if head.scale != 1.0 else hidden, head.weight, head.bias)
        return head.soft_cap * torch.tanh(raw / head.soft_cap) if head.soft_cap else raw


_GRID_IMAGE = Tower("image_token_id", ("pixel_values", "image_grid_thw"), "model.visual.", features=of_grids,
                    per_token=lambda config: config.vision_config.spatial_merge_size**2, least=least_grid)
_GRID_VIDEO = replace(_GRID_IMAGE, token="video_token_id", reads=("pixel_values_videos", "video_grid_thw"))
_QWEN_VL = Family({"image": _GRID_IMAGE, "video": _GRID_VIDEO}, rope_of_grids)
_SIZED = Tower("image_token_id", ("pixel_values", "image_sizes"), least=least_picture)
_TILES = Tower("image_token_id", ("pixel_values", ), merge=torch.cat,
               per_token=lambda config: round(config.downsample_ratio**-2))
_STILLS = replace(_TILES, reads=("pixel_values_videos", ), dim=1, features=of_tiles)
_TILE_ROW = Tower("image_token_id", ("pixel_values", "pixel_attention_mask"), "model.vision_model.", 1, merge=torch.cat,
                  per_token=lambda config: config.scale_factor**2, features=of_tile_rows)
_SOUND = Tower("audio_token_id", ("input_features", "feature_attention_mask"), "model.audio_tower.",
               per_token=lambda config: 2)
_OMNI_SOUND = replace(_SOUND, path=f"{OMNI_PATH}audio_tower.", features=of_omni_sounds, least=least_frames)
_OMNI_VISUAL = f"{OMNI_PATH}visual."
_OMNI = Family({"image": replace(_GRID_IMAGE, path=_OMNI_VISUAL), "video": replace(_GRID_VIDEO, path=_OMNI_VISUAL),
                "audio": _OMNI_SOUND}, rope_of_omni)  # yapf: disable
_GLM_VIDEO = replace(_GRID_VIDEO, token="image_token_id", between=("video_start_token_id", "video_end_token_id"))
_GLM = Family({"image": _GRID_IMAGE, "video": _GLM_VIDEO}, rope_of_grids)
_POOLED = Tower("image_token_id", ("pixel_values", ), per_token=pooled)
_PLACED = Tower("image_token_id", ("pixel_values", "image_position_ids"), least=least_placed,
                per_token=lambda config: config.vision_config.pooling_kernel_size**2)
_PLACED_FRAMES = replace(_PLACED, token="video_token_id", reads=("pixel_values_videos", "video_position_ids"),
                         merge=torch.cat, features=of_pictures)
_GEMMA4 = Family({"image": _PLACED, "video": _PLACED_FRAMES}, None, "sliding", per_layer_inputs,
                 unused={"audio": "model.audio_tower."})  # yapf: disable
_BY_NUMBER = replace(_SIZED, reads=("pixel_values", "image_sizes", "batch_num_images"), features=of_several)
_FRAMES = Tower("video_token_id", ("pixel_values_videos", ), dim=1, merge=video_of_frames, features=of_frames,
                per_token=lambda config: 4)
_WINDOWS = Tower("audio_token_id", ("input_features", ), "model.audio_tower.", merge=torch.cat, token_frames=8,
                 per_token=lambda config: config.audio_config.intermediate_size // config.audio_config.hidden_size,
                 features=of_windows)

FAMILIES = {
    "gemma3": Family({"image": _POOLED}, blocks="all"),
    "gemma4": _GEMMA4,
    "glm4v": _GLM,
    "glm46v": _GLM,
    "idefics3": Family({"image": _TILE_ROW}),
    "internvl": Family({"image": _TILES, "video": _STILLS}),
    "llava": Family({"image": _SIZED}),
    "llava_next": Family({"image": _SIZED}),
    "llava_onevision": Family({"image": _BY_NUMBER, "video": _FRAMES}),
    "mistral3": Family({"image": replace(_SIZED, per_token=lambda config: config.spatial_merge_size**2)}),
    "qwen2_5_omni_thinker": _OMNI,
    "qwen2_audio": Family({"audio": replace(_SOUND, features=of_qwen2_audio)}),
    "qwen2_vl": _QWEN_VL,
    "qwen2_5_vl": _QWEN_VL,
    "qwen3_5": _QWEN_VL,
    "qwen3_5_moe": _QWEN_VL,
    "qwen3_vl": _QWEN_VL,
    "qwen3_vl_moe": _QWEN_VL,
    "smolvlm": Family({"image": _TILE_ROW, "video": _TILE_ROW}),
    "voxtral": Family({"audio": _WINDOWS}),
}
