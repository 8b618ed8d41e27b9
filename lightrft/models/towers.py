"""Towers (encoders of pictures, videos and sounds): features by family, and positions of tokens.

Shapes of media stay on the host, which computes everything that a tower would otherwise read back from the GPU:
positions, and the bounds of pictures, frames and windows. They are copied to the GPU through pinned memory, without a
wait.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni
from transformers.vision_utils import (get_vision_cu_seqlens, get_vision_interpolation_indices_and_weights,
                                       get_vision_position_ids, get_vision_window_index)

from lightrft.models.attention import PackedLayout, SEGMENTED
from lightrft.types import MediaTensors
from lightrft.utils.tensors import upload

Tensors = dict[str, Tensor]
_SIZES = ("image_sizes", )  # read on the host alone
_VIDEO = 2  # kind of a token, as Hugging Face numbers them
_GRIDS = ("image_grid_thw", "video_grid_thw")
OMNI_PATH = "model." if "Qwen2_5OmniThinkerModel" in vars(omni) else ""  # the towers' place, since transformers 5.21


@dataclass(frozen=True)
class Features:
    """Features of several media: [n_i, H] each, in order; ``levels`` are those that deeper layers add (Qwen3-VL)."""
    each: list[Tensor]
    levels: list[list[Tensor]] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Sequence["Features"]) -> "Features":
        """Join the features of media, in order."""
        return cls([one for part in parts for one in part.each],
                   [[one for level in some for one in level] for some in zip(*(part.levels for part in parts))])

    def on_host(self) -> "Features":
        """Copy to host memory."""
        return Features([one.cpu() for one in self.each], [[one.cpu() for one in level] for level in self.levels])

    @property
    def nbytes(self) -> int:
        """Bytes of all features."""
        return sum(one.nbytes for some in (self.each, *self.levels) for one in some)


def _placed(hf: PreTrainedModel, tensors: Tensors) -> Tensors:
    """Copy all but sizes to the device of the model."""
    device: Any = hf.get_input_embeddings().weight.device
    return {name: tensor if name in _SIZES else upload(tensor, device) for name, tensor in tensors.items()}


def of_method(hf: Any, tower: Any, kind: str, tensors: Tensors) -> Features:
    """Features as ``get_image_features`` and its like return them: one tensor per medium, or one for all."""
    return Features(list(getattr(hf, f"get_{kind}_features")(**_placed(hf, tensors), return_dict=True).pooler_output))


def of_grids(hf: Any, tower: Any, kind: str, tensors: Tensors) -> Features:
    """Features of pictures and videos as grids of patches: Qwen-VL and GLM-V."""
    pixels, grid = tensors.values()
    frames = frames_of(grid)
    inputs, bounds = _of_shapes(tower, frames)
    given = _placed(hf, {"grid_thw": frames, "pixels": pixels} | inputs) | _segments(hf, bounds)
    out = tower(given.pop("pixels").type(tower.dtype), return_dict=True, **given)
    sizes = (grid.prod(-1) // tower.spatial_merge_size**2).tolist()
    levels = getattr(out, "deepstack_features", None) or ()
    return Features(list(out.pooler_output.split(sizes)), [list(level.split(sizes)) for level in levels])


def frames_of(grid: Tensor) -> Tensor:
    """Grids [frames, 3] of the single frames of the pictures and videos of ``grid`` [n, 3] (frames, height, width),
    which towers see one by one."""
    return grid.repeat_interleave(grid[:, 0], 0).index_fill(1, torch.tensor(0), 1)


def _of_shapes(tower: Any, grid: Tensor) -> tuple[Tensors, Tensors]:
    """Compute from ``grid`` [n, 3] (1, height, width; on the host) what a tower otherwise asks the device for:
    positions, and the bounds of frames and windows."""
    merge, config = tower.spatial_merge_size, tower.config
    found, bounds = {"position_ids": get_vision_position_ids(grid, merge)}, {"": get_vision_cu_seqlens(grid)}
    if hasattr(tower, "fullatt_block_indexes"):
        found["window_index"], bounds["window_"] = get_vision_window_index(grid, merge, config.window_size,
                                                                           config.patch_size)
    if hasattr(tower, "num_grid_per_side"):
        found["interp_indices"], found["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grid, tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners, merge)
    return found, bounds


def _segments(hf: PreTrainedModel, bounds: Tensors) -> dict[str, Any]:
    """Arguments of a tower for its attention in segments; ``bounds``: on the host, by what the tower calls them."""
    layouts = {name: PackedLayout(cu, bounds[name].diff().tolist()) for name, cu in _placed(hf, bounds).items()}
    given: dict[str, Any] = {"segments": list(layouts.values())}
    for name, layout in layouts.items():
        given |= {f"cu_{name}seqlens": layout.cu_seqlens, f"max_{name}seqlen": layout.max_len}
    return given


def of_windows(hf: Any, tower: Any, kind: str, tensors: Tensors) -> Features:
    """Features of windows of sound, which Voxtral returns one after another."""
    mel = _placed(hf, tensors)["input_features"]
    return Features(list(hf.get_audio_features(mel, return_dict=True).pooler_output.chunk(len(mel))))


def of_frames(hf: Any, tower: Any, kind: str, tensors: Tensors) -> Features:
    """Features of frames of LLaVA-OneVision, each with the line break that ends a video, which transformers before
    5.19 adds elsewhere."""
    (frames, ), vision = _placed(hf, tensors).values(), hf.config.vision_config
    pooled = ceil(vision.image_size // vision.patch_size / 2)**2
    rows = hf.get_video_features(frames.transpose(0, 1), return_dict=True).pooler_output
    return Features([torch.cat([row[:pooled], hf.model.image_newline[None].to(row)]) for row in rows])


def of_pictures(hf: Any, tower: Any, kind: str, tensors: Tensors) -> Features:
    """Features of frames of videos, which Gemma-4 sees as pictures."""
    return Features(list(hf.get_image_features(*_placed(hf, tensors).values(), return_dict=True).pooler_output))


def of_tile_rows(hf: Any, tower: Any, kind: str, tensors: Tensors) -> Features:
    """Features of tiles of pictures, and of frames, which Idefics3 and SmolVLM see as pictures. In transformers 5.24
    those of all tiles of a row are one tensor."""
    out = hf.get_image_features(*_placed(hf, tensors).values(), return_dict=True).pooler_output
    if isinstance(out, Tensor):
        return Features(list(out))
    vision = hf.config.vision_config
    tokens = (vision.image_size // vision.patch_size // hf.config.scale_factor)**2  # of a tile
    return Features(list(torch.cat(list(out)).split(tokens)))


def of_tiles(hf: Any, tower: Any, kind: str, tensors: Tensors) -> Features:
    """Features of frames [1, n, 3, h, w] of videos, which InternVL sees as tiles of pictures."""
    return of_pictures(hf, tower, kind, {name: frames[0] for name, frames in tensors.items()})


def video_of_frames(frames: list[Tensor]) -> Tensor:
    """Join frames; only the last one keeps its line break."""
    return torch.cat([*(frame[:-1] for frame in frames[:-1]), frames[-1]])


def of_several(hf: Any, tower: Any, kind: str, tensors: Tensors) -> Features:
    """Features of pictures of LLaVA-OneVision: all tiles of one that is alone in its prompt, the whole of others.

    Hugging Face takes the number of pictures of each prompt. It takes a number of 1 for a lone picture: a single one
    of several is given twice.
    """
    several = tensors.pop("batch_num_images") > 1
    order = several.int().argsort(stable=True).tolist()
    count, alone = int(several.sum()), len(order) - int(several.sum())
    taken = order + order[-1:] * (count == 1)
    runs = [1] * alone + [max(count, 2)] * (count > 0)
    given = _placed(hf, {name: tensor[taken] for name, tensor in tensors.items()})
    each = dict(zip(taken, hf.get_image_features(**given, batch_num_images=runs, return_dict=True).pooler_output))
    return Features([each[i] for i in range(len(order))])


def of_omni_sounds(hf: Any, tower: Any, kind: str, tensors: Tensors) -> Features:
    """Features of sounds of Qwen2.5-Omni, whose tower sees them one after another, in chunks."""
    mel, mask = tensors.values()
    lens, frames = mask.sum(-1), mel.permute(0, 2, 1)[mask.bool()].T
    padded, chunks = omni.chunk_and_pad_features(frames, lens, tower.n_window)
    given = {"padded_feature": padded, "chunk_lengths": chunks, "valid_indices": omni.get_valid_indices(chunks),
             "pool_indices": omni.get_pool_indices(lens)}  # yapf: disable
    rows = tower(**_placed(hf, given), **_segments(hf, {"": omni.get_audio_cu_seqlens(chunks)})).last_hidden_state
    return Features(list(rows.split(tower._get_feat_extract_output_lengths(lens)[1].tolist())))


def of_qwen2_audio(hf: Any, tower: Any, kind: str, tensors: Tensors) -> Features:
    """Features of Qwen2-Audio, whose class computes them inside of its forward."""
    mel, mask = tensors.values()
    frames, lens = tower._get_feat_extract_output_lengths(mask.sum(-1))
    keep = torch.arange(tower.config.max_source_positions) < frames[:, None]
    mel, keep = _placed(hf, {"mel": mel, "keep": keep}).values()
    seen = keep[:, None, None].expand(-1, 1, keep.shape[1], -1)
    rows = hf.model.multi_modal_projector(tower(mel, attention_mask=seen).last_hidden_state)
    return Features([row[:length] for row, length in zip(rows, lens.tolist())])


def pooled(config: Any) -> int:
    """Compute the patches of a picture of Gemma-3 for each of its tokens."""
    return (config.vision_config.image_size // config.vision_config.patch_size)**2 // config.mm_tokens_per_image


def least_grid(hf: Any, tensors: Tensors) -> Tensors:
    """Cut a grid of patches to those of one token."""
    (pixels, rows), (grid, _) = tensors.items()
    merge = hf.config.vision_config.spatial_merge_size
    return {pixels: rows[:merge**2], grid: torch.tensor([[1, merge, merge]])}


def least_picture(hf: Any, tensors: Tensors) -> Tensors:
    """Cut a picture [1, 3, h, w] to the pixels of two tokens where the tower takes any size (Pixtral). Of a single one
    transformers would squeeze the dimension away."""
    tower = hf.config.vision_config
    if tower.model_type != "pixtral":
        return tensors
    side = tower.patch_size * config_value(hf.config, "spatial_merge_size", 1)
    (pixels, picture), (sizes, _) = tensors.items()
    return {pixels: picture[..., :side, :2 * side], sizes: torch.tensor([[side, 2 * side]])}


def least_placed(hf: Any, tensors: Tensors) -> Tensors:
    """Cut patches with positions [1, n, 2] to those of one token (Gemma-4)."""
    (_, places), side = tensors.values(), hf.config.vision_config.pooling_kernel_size
    first = ((places >= 0) & (places < side)).all(-1)[0]
    return {name: one[:, first] for name, one in tensors.items()}


def least_frames(hf: Any, tensors: Tensors) -> Tensors:
    """Cut a sound to the four frames of one token (Qwen2.5-Omni)."""
    return {name: one[..., :4] for name, one in tensors.items()}


@dataclass(frozen=True)
class Tower:
    """Encoder of one kind of media; the function ``features`` computes their features from the model, the
    tower, the kind and the tensors that the tower reads, on the host.

    Attributes:
        token: the config's name of the token that stands for a feature.
        reads: the processor's tensors that the tower reads.
        path: the names of the tower's parameters begin with it.
        dim: the tensors of several media are joined along it.
        merge: joins the features of the tiles, frames or windows of a medium, which ``dim`` counts; None: a medium has
            one tensor of features.
        between: the config's names of tokens; between them in a prompt, ``token`` stands for this kind of media, and
            elsewhere for the other kind with that token (GLM-V).
        token_frames: frames of a sound for each token, where the processor cuts sounds into whole windows and writes no
            tokens for them (Voxtral, whose prompts are Mistral's); 0: it writes them.
        per_token: computes from the config how many positions of the tower become a token.
        least: cuts the tensors of a blank medium to what the tower takes at least.
    """
    token: str
    reads: tuple[str, ...]
    path: str = "model.vision_tower."
    dim: int = 0
    merge: Callable[[list[Tensor]], Tensor] | None = None
    between: tuple[str, ...] = ()
    token_frames: int = 0
    features: Callable[[Any, Any, str, Tensors], Features] = of_method
    per_token: Callable[[Any], int] = lambda config: 1
    least: Callable[[Any, Tensors], Tensors] = lambda hf, tensors: tensors

    def module(self, hf: PreTrainedModel) -> Any:
        """The tower of ``hf``."""
        return hf.get_submodule(self.path[:-1])

    def inputs(self, medium: MediaTensors) -> Tensors:
        """Tensors of a medium that the tower reads. Grids are those of single frames, as the trainer passes them."""
        found = {name: medium.tensors[name] for name in self.reads if name in medium.tensors}
        return {name: frames_of(one) if name in _GRIDS else one for name, one in found.items()}

    def least_of(self, hf: PreTrainedModel, blank: MediaTensors) -> MediaTensors:
        """Cut a ``blank`` medium to its smallest part: one tile, frame or window, or few patches."""
        given = {name: blank.tensors[name] for name in self.reads if name in blank.tensors}
        cut = {name: one[:, :1] if self.dim else one[:1] for name, one in given.items()}
        return replace(blank, tensors=self.least(hf, given if self.merge is None else cut))

    def adapt(self, hf: PreTrainedModel) -> None:
        """Let the tower attend in segments, if it does; a model cannot be loaded with this attention."""
        if self.features in (of_grids, of_omni_sounds):
            own = self.module(hf).config
            (name, ) = (name for name in hf.config.sub_configs if vars(hf.config)[name] is own)
            hf.set_attn_implementation({name: SEGMENTED})

    def of(self, hf: PreTrainedModel, kind: str, media: list[MediaTensors]) -> Features:
        """Compute the features of ``media``, on the device of the model, in one pass."""
        joined = {name: _join([one.tensors[name] for one in media], self.dim)
                  for name in self.reads if name in media[0].tensors}  # yapf: disable
        found = self.features(hf, self.module(hf), kind, joined)
        if self.merge is None:
            return found
        tiles = iter(found.each)
        counts = [one.tensors[self.reads[0]].shape[self.dim] for one in media]
        return Features([self.merge(list(islice(tiles, count))) for count in counts])


@dataclass(frozen=True)
class Family:
    """Particulars of a family.

    Attributes:
        towers: by kind of media.
        rope: computes the positions [3, L] of a prompt, from its token ids [L], their kinds [L] (0 text, 1 image,
            2 video) and the tensors of its media; None: a token's index is its position.
        blocks: the layers in which the tokens of a picture see each other in both directions: "all", "sliding" (those
            with a window, where the config says ``use_bidirectional_attention: vision``) or "" (none).
        layers: computes what every layer of the decoder reads of the tokens, from their ids [T] and the places of
            media; None: nothing.
        unused: parts that a model may have and that no medium here goes through, with the prefix of their parameters.
    """
    towers: dict[str, Tower]
    rope: Callable[[Any, Tensor, Tensor, list[MediaTensors]], Tensor] | None = None
    blocks: str = ""
    layers: Callable[[Any, Tensor, Tensor], dict[str, Any]] | None = None
    unused: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> dict[str, str]:
        """Prefix of the parameters of each tower, by part of the model."""
        return {part_of(kind): tower.path for kind, tower in self.towers.items()} | self.unused


def part_of(kind: str) -> str:
    """The part of a model that reads media of ``kind``, as users name it."""
    return "audio" if kind == "audio" else "visual"


def of_levels(tokens: int, where: list[Tensor], levels: list[list[Tensor]]) -> dict[str, Any]:
    """Arguments of a decoder that adds features to the outputs of its first layers, in the order of the tokens."""
    if not any(levels):
        return {}
    places = torch.cat(where)
    order = places.argsort()
    mask = torch.zeros(tokens, dtype=torch.bool, device=places.device).index_fill(0, places, True)
    return {
        "visual_pos_masks": mask[None], "deepstack_visual_embeds": [torch.cat(level)[order] for level in zip(*levels)]
    }


def _join(parts: list[Tensor], dim: int) -> Tensor:
    """Join along ``dim``; zeros fill the other dimensions up to the largest."""
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts))]
    pads = [[pad for i in reversed(range(part.ndim)) for pad in (0, 0 if i == dim else shape[i] - part.shape[i])]
            for part in parts]  # yapf: disable
    return torch.cat([nn.functional.pad(part, pad) for part, pad in zip(parts, pads)], dim)


def _all_of(media: list[MediaTensors], *names: str) -> Tensors:
    """Join the tensors ``names`` of those media that have them."""
    found = {name: [one.tensors[name] for one in media if name in one.tensors] for name in names}
    return {name: torch.cat(parts) for name, parts in found.items() if parts}


def rope_of_grids(hf: Any, ids: Tensor, kinds: Tensor, media: list[MediaTensors]) -> Tensor:
    """M-RoPE of Qwen-VL and GLM-V: the patches of a medium span time, height and width, and what follows counts on from
    the largest of their positions. Frames of Qwen2.5-VL are as far apart as they were shot, which transformers before
    5.19 rounds to seconds.

    From transformers 5.3 on it counts on from height and width alone (its issue 45381): text after a long video of
    Qwen2-VL or Qwen2.5-VL would have the positions of frames.
    """
    given = _all_of(media, "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    seconds = iter(given.pop("second_per_grid_ts", torch.empty(0)).double().tolist())
    pace = config_value(hf.config.vision_config, "tokens_per_second", 1)  # positions from one second to the next
    found, following = hf.model.get_rope_index(ids[None], kinds[None].int(), **given)[0][:, 0], 0
    starts = [0, *((kinds[1:] != kinds[:-1]).nonzero()[:, 0] + 1).tolist(), len(ids)]
    for start, end in zip(starts, starts[1:]):
        if kinds[start] == _VIDEO and (apart := next(seconds, None)) is not None:
            frame = (found[0, start:end] - found[0, start]) // pace
            found[0, start:end] = found[0, start] + (frame.double() * (pace * apart)).long()  # in 64 bits, as in vLLM
        found[:, start:end] += following - found[0, start]
        following = int(found[:, start:end].max()) + 1
    return found


def rope_of_omni(hf: Any, ids: Tensor, kinds: Tensor, media: list[MediaTensors]) -> Tensor:
    """M-RoPE of Qwen2.5-Omni, which also counts the frames of sounds."""
    given = _all_of(media, "image_grid_thw", "video_grid_thw", "feature_attention_mask")
    seconds = _all_of(media, "video_second_per_grid").get("video_second_per_grid")
    frames = given.pop("feature_attention_mask").sum(-1) if "feature_attention_mask" in given else None
    mask, above_towers = torch.ones_like(ids)[None], hf.get_submodule(OMNI_PATH.rstrip("."))
    return above_towers.get_rope_index(ids[None], **given, attention_mask=mask, audio_seqlens=frames,
                                       second_per_grids=seconds)[0][:, 0]


def per_layer_inputs(hf: Any, ids: Tensor, places: Tensor) -> dict[str, Any]:
    """Look up what every layer of Gemma-4 reads of the tokens; those of media count as padding."""
    decoder = hf.get_decoder()
    if not decoder.hidden_size_per_layer_input:
        return {}
    padding = config_value(decoder.config, "pad_token_id", 0)
    return {
        "per_layer_inputs":
        decoder.get_per_layer_inputs(ids.index_fill(0, upload(places, ids.device), padding)[None], None)
    }


def config_value(source: PretrainedConfig, key: str, default: Any) -> Any:
    """Entry ``key`` of a Hugging Face config, or ``default``; families omit, or set to None, what they do not have."""
    value = getattr(source, key, None)
    return default if value is None else value
