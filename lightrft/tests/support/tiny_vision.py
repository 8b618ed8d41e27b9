"""Tiny random models that see, with their processors; their classes need torchvision."""
from pathlib import Path
from typing import Any

import torch
from transformers import (AutoConfig, AutoModelForImageTextToText, GenerationConfig, PreTrainedModel,
                          Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor, Qwen3VLProcessor,
                          Qwen3VLVideoProcessor)

from lightrft.tests.support import tiny

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
_MARKS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
          "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}  # yapf: disable
_TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.12,
         "bos_token_id": None}  # yapf: disable
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
          "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
          "initializer_range": 0.12}  # yapf: disable
_PIXELS = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
           "size": {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}}  # yapf: disable
# what differs in the language model and in the tower, and the processors
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], Any, Any]] = {
    "qwen2_5_vl": ({}, {"window_size": 56, "fullatt_block_indexes": [1]}, Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
    "qwen3_vl": ({"mrope_interleaved": True}, {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
                 Qwen3VLProcessor, Qwen3VLVideoProcessor),
}  # yapf: disable


def model(family: str, tied: bool, tokenizer: Any) -> PreTrainedModel:
    """A float32 model of ``family`` with random weights, always the same."""
    rope, tower, _, _ = FAMILIES[family]
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = _TEXT | ends | {"vocab_size": len(tokenizer), "rope_parameters": _ROPE | rope, "tie_word_embeddings": tied}
    marks = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in _MARKS.items()}
    config = AutoConfig.for_model(family, text_config=text, vision_config=_TOWER | tower, tie_word_embeddings=tied,
                                  **marks)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    hf.generation_config = GenerationConfig(**ends)
    return hf


def save_model(folder: Path | str, family: str, tied: bool) -> Path:
    """Write such a model, its tokenizer and processors to ``folder``, as a download would look; returns it."""
    path, tokenizer = Path(folder), tiny.tokenizer()
    tokenizer.add_tokens(list(_MARKS.values()), special_tokens=True)
    _, _, processor, video = FAMILIES[family]
    model(family, tied, tokenizer).save_pretrained(path)
    processor(image_processor=Qwen2VLImageProcessor(**_PIXELS), tokenizer=tokenizer,
              video_processor=video(**_PIXELS)).save_pretrained(path)
    return path
