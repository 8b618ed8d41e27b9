"""Make everything the quickstart with a hybrid model needs: a tiny untrained Qwen3.5, and the data of the quickstart.

    python examples/quickstart_hybrid/prepare.py --out runs/quickstart_hybrid [--seed 42]

writes OUT/base (HF model and tokenizer), OUT/data/{train,test}.parquet (prompts) and OUT/data/sft.parquet (careless
demonstrations).
"""
import sys
from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

sys.path.append(str(Path(__file__).parents[1] / "quickstart"))
import task  # noqa: E402
from common import build_tokenizer, command_line, text_config, write_folder  # noqa: E402

LAYERS = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 32, "linear_num_key_heads": 2,
          "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}  # yapf: disable


def write_base(folder: Path, seed: int) -> None:
    """Save an untrained Qwen3.5 with a delta-rule layer and one of attention, and its tokenizer, in HF format."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text_config(tokenizer) | LAYERS)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Run the command line."""
    args = command_line(__doc__, "runs/quickstart_hybrid", rows=(10000, 1000, 300 * 32)).parse_args()
    write_folder(args, write_base, task)


if __name__ == "__main__":
    main()
