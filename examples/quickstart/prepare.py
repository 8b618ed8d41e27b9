"""Make everything the quickstart needs: a tiny untrained model with its tokenizer, and its data sets.

    python examples/quickstart/prepare.py --out runs/quickstart [--seed 42]

writes OUT/base (HF model and tokenizer), OUT/data/{train,test}.parquet (prompts) and OUT/data/sft.parquet (careless
demonstrations).
"""
from pathlib import Path

import task
import torch
from common import build_tokenizer, command_line, text_config, write_folder
from transformers import Qwen2Config, Qwen2ForCausalLM


def write_base(folder: Path, seed: int) -> None:
    """Save an untrained Qwen2 of 136k parameters and its tokenizer in HF format."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config(**text_config(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__, "runs/quickstart", rows=(10000, 1000, 600 * 32))
    parser.add_argument("--digits", type=int, default=task.WIDTH, help="digits of each number")
    args = parser.parse_args()
    task.WIDTH = args.digits
    write_folder(args, write_base, task)


if __name__ == "__main__":
    main()
