"""Tiny models that see pictures as grids of patches, with positions in time, height and width: Qwen-VL and GLM-V."""
from itertools import groupby

import torch
from transformers import (Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor, Glm46VImageProcessor,
                          Glm46VProcessor, Glm46VVideoProcessor, Qwen2_5_VLProcessor, Qwen2VLImageProcessor,
                          Qwen2VLProcessor, Qwen2VLVideoProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor)

from lightrft.tests.support.tiny_family import TinyFamily

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
_QWEN = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
         "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}  # yapf: disable
_GLM = {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>"}  # yapf: disable
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
_HALF = ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
GRID_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
              "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
              "initializer_range": 0.12}  # yapf: disable
PIXELS = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
          "size": {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}}  # yapf: disable


def _with_positions(hf, given):
    """Add the positions of a prompt: what follows a medium counts on from the largest of them, as in the first code of
    these models. Transformers from 5.3 on counts on from height and width."""
    config, kinds = hf.config.vision_config, given["mm_token_type_ids"][0].tolist()
    seconds = iter(given.get("second_per_grid_ts", ()))
    grids = {kind: iter(given.get(f"{name}_grid_thw", torch.zeros(0, 3)).tolist())
             for kind, name in ((1, "image"), (2, "video"))}  # yapf: disable
    found, following = [], 0
    for kind, run in groupby(kinds):
        if kind:
            times, rows, columns = next(grids[kind])
            step = float(next(seconds, 1)) * getattr(config, "tokens_per_second", 1) if kind == 2 else 1
            part = [[int(t * step), y, x] for t in range(times) for y in range(rows // config.spatial_merge_size)
                    for x in range(columns // config.spatial_merge_size)]  # yapf: disable
        else:
            part = [[i] * 3 for i, _ in enumerate(run)]
        found += [[following + one for one in position] for position in part]
        following = max(map(max, found[-len(part):])) + 1
    return given | {"position_ids": torch.tensor(found).T[:, None]}


def _qwen(family, rope, tower, processor, video, text=None):
    """A Qwen-VL model, with what differs in its positions, its tower and its language model."""
    text = {"rope_parameters": ROPE | rope} | (text or {})
    return TinyFamily(
        family, {"text_config": text, "vision_config": GRID_TOWER | {"in_chans": 3} | tower},
        lambda tok: processor(image_processor=Qwen2VLImageProcessor(**PIXELS), tokenizer=tok,
                              video_processor=video(**PIXELS)),
        {"image": PICTURE, "video": VIDEO}, _QWEN,
        forwarded=_with_positions if family in ("qwen2_vl", "qwen2_5_vl") else lambda hf, given: given)  # yapf: disable


def _glm(family, processor, image, video):
    """A GLM-V model. vLLM has biases only with ``attention_bias``."""
    text = {"rope_parameters": _HALF, "attention_bias": True}
    return TinyFamily(
        family, {"text_config": text, "vision_config": GRID_TOWER | {"image_size": 56, "attention_bias": False}},
        lambda tok: processor(image(**PIXELS), tok, video(**PIXELS)),
        {"image": "<|begin_of_image|><|image|><|end_of_image|>",
         "video": "<|begin_of_video|><|video|><|end_of_video|>"}, _GLM, together=False)  # yapf: disable


_DEEPSTACK = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
_STATE = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
          "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # yapf: disable
_STATE_ROPE = {"mrope_interleaved": True, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
GRIDS = {
    "qwen2_vl": _qwen("qwen2_vl", {}, {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}, Qwen2VLProcessor,
                      Qwen2VLVideoProcessor),
    "qwen2_5_vl": _qwen("qwen2_5_vl", {}, {"window_size": 56, "fullatt_block_indexes": [1]}, Qwen2_5_VLProcessor,
                        Qwen2VLVideoProcessor),
    "qwen3_vl": _qwen("qwen3_vl", {"mrope_interleaved": True}, _DEEPSTACK, Qwen3VLProcessor, Qwen3VLVideoProcessor),
    "qwen3_vl_moe": _qwen("qwen3_vl_moe", {"mrope_interleaved": True}, _DEEPSTACK, Qwen3VLProcessor,
                          Qwen3VLVideoProcessor, _EXPERTS),
    "qwen3_5": _qwen("qwen3_5", _STATE_ROPE, {"num_position_embeddings": 16}, Qwen3VLProcessor, Qwen3VLVideoProcessor,
                     _STATE),
    "qwen3_5_moe": _qwen("qwen3_5_moe", _STATE_ROPE, {"num_position_embeddings": 16}, Qwen3VLProcessor,
                         Qwen3VLVideoProcessor, _STATE | _EXPERTS | {"shared_expert_intermediate_size": 32,
                                                                     "initializer_range": 0.09}),
    "glm4v": _glm("glm4v", Glm4vProcessor, Glm4vImageProcessor, Glm4vVideoProcessor),
    "glm46v": _glm("glm46v", Glm46VProcessor, Glm46VImageProcessor, Glm46VVideoProcessor),
}  # yapf: disable
