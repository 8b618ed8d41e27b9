"""Make everything the quickstart that sees needs: a tiny untrained Qwen2.5-VL with its processor, and its data sets.

    python examples/quickstart_vl/prepare.py --out runs/quickstart_vl [--seed 42]

writes OUT/base (HF model, tokenizer and processor), OUT/data/{train,test}.parquet (prompts with pictures) and
OUT/data/sft.parquet (careless demonstrations).
"""
import sys
from pathlib import Path

import torch
from task import TASK
from transformers import (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor,
                          Qwen2VLImageProcessor, Qwen2VLVideoProcessor)

sys.path.append(str(Path(__file__).parents[1] / "quickstart"))
from common import build_tokenizer, command_line, text_config, write_folder  # noqa: E402

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|video_pad|>"
PATCHES = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2,
           "size": {"shortest_edge": 16 * 16, "longest_edge": 256 * 16 * 16}}  # yapf: disable
TOWER = {"depth": 1, "hidden_size": 64, "intermediate_size": 256, "num_heads": 2, "out_hidden_size": 64,
         "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "fullatt_block_indexes": [0],
         "initializer_range": 0.1}  # yapf: disable
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}


def write_base(folder: Path, seed: int) -> None:
    """Save an untrained Qwen2.5-VL of 310k parameters with its processor in HF format; a picture is 9 tokens."""
    tokenizer = build_tokenizer(PICTURE, (VIDEO, ))
    marks = {"image_token_id": "<|image_pad|>", "video_token_id": VIDEO, "vision_start_token_id": "<|vision_start|>",
             "vision_end_token_id": "<|vision_end|>"}  # yapf: disable
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}
    config = Qwen2_5_VLConfig(text_config=text_config(tokenizer) | {"rope_parameters": ROPE}, vision_config=TOWER,
                              tie_word_embeddings=True, **ids)  # yapf: disable
    torch.manual_seed(seed)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    Qwen2_5_VLProcessor(Qwen2VLImageProcessor(**PATCHES), tokenizer, Qwen2VLVideoProcessor(**PATCHES),
                        chat_template=tokenizer.chat_template).save_pretrained(folder)


def main() -> None:
    """Run the command line."""
    args = command_line(__doc__, "runs/quickstart_vl", rows=(4000, 500, 4096)).parse_args()
    write_folder(args, write_base, TASK)


if __name__ == "__main__":
    main()
