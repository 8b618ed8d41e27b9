"""Make everything the quickstart that hears needs: a tiny untrained Qwen2-Audio with its processor, and its data sets.

    python examples/quickstart_audio/prepare.py --out runs/quickstart_audio [--seed 42]

writes OUT/base (HF model, tokenizer and processor), OUT/data/{train,test}.parquet (prompts with sounds) and
OUT/data/sft.parquet (careless demonstrations).
"""
import sys
from pathlib import Path

import torch
from task import RATE, TASK
from transformers import (Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, Qwen2AudioProcessor,
                          WhisperFeatureExtractor)

sys.path.append(str(Path(__file__).parents[1] / "quickstart"))
from common import build_tokenizer, command_line, text_config, write_folder  # noqa: E402

SOUND = "<|audio_bos|><|AUDIO|><|audio_eos|>"
MEL_BINS, WINDOW = 32, 1  # seconds
TOWER = {"num_mel_bins": MEL_BINS, "d_model": 64, "encoder_layers": 1, "encoder_attention_heads": 2,
         "encoder_ffn_dim": 256, "max_source_positions": 50 * WINDOW, "init_std": 0.1}  # yapf: disable


def write_base(folder: Path, seed: int) -> None:
    """Save an untrained Qwen2-Audio of 216k parameters with its processor in HF format; a sound is 25 tokens."""
    tokenizer = build_tokenizer(SOUND)
    text = {"model_type": "qwen2", "tie_word_embeddings": False}  # as Hugging Face's class has it, whatever is here
    config = Qwen2AudioConfig(text_config=text_config(tokenizer) | text,
                              audio_config=TOWER | {"model_type": "qwen2_audio_encoder"},
                              audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"))
    torch.manual_seed(seed)
    Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=MEL_BINS, sampling_rate=RATE, chunk_length=WINDOW)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template=tokenizer.chat_template).save_pretrained(folder)


def main() -> None:
    """Run the command line."""
    args = command_line(__doc__, "runs/quickstart_audio", rows=(4000, 500, 4096)).parse_args()
    write_folder(args, write_base, TASK)


if __name__ == "__main__":
    main()
