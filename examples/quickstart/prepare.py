"""Make everything the quickstart needs: a tiny untrained model with its tokenizer, and its data sets.

    python examples/quickstart/prepare.py --out runs/quickstart [--seed 42]

writes OUT/base (HF model and tokenizer), OUT/data/{train,test}.parquet (prompts) and OUT/data/sft.parquet (careless
demonstrations).
"""
import argparse
import string
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import task
import torch
from transformers import AddedToken, logging as hf_logging, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = ["<think>", "</think>", "\\boxed{"]
CHARACTERS = "\n W" + string.digits + string.ascii_lowercase + "+-*/=,.?!:;(){}'\"%$"
POSITIONS = 2048  # rotary, so they cost nothing; the problems of examples/gsm8k_geo3k fit too
CHAT_TEMPLATE = ("{% for message in messages %}{% if message['role'] == 'assistant' %}"
                 "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
                 "{% else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}")


def build_tokenizer() -> Qwen2Tokenizer:
    """Build a tokenizer with one token per character and per tag, 64 in all; a question ends with a newline, an answer
    with ``<eos>``.

    It is Qwen2's byte-level BPE without merges, because ``AutoTokenizer`` forces that class on folders that hold a
    Qwen2 model.
    """
    letters = CHARACTERS.replace("\n", "Ċ").replace(" ", "Ġ")
    vocab = {token: i for i, token in enumerate(SPECIAL + WORDS + list(letters))}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                               padding_side="left", chat_template=CHAT_TEMPLATE,
                               model_max_length=POSITIONS)  # yapf: disable
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in WORDS])
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """Build a Qwen2 of 136k parameters with random weights."""
    config = Qwen2Config(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=256, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=POSITIONS,
                         tie_word_embeddings=True, initializer_range=0.1, bos_token_id=None,
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)  # yapf: disable
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config)


def write_base(folder: Path, seed: int) -> None:
    """Save the untrained model and its tokenizer in HF format."""
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_data(folder: Path, seed: int, train_rows: int, test_rows: int, sft_rows: int) -> None:
    """Write the training and held-out prompts and the demonstrations."""
    write_rows(folder / "train.parquet", task.prompt_rows(train_rows, "train", seed))
    write_rows(folder / "test.parquet", task.prompt_rows(test_rows, "test", seed))
    write_rows(folder / "sft.parquet", task.demonstration_rows(sft_rows, seed))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder of the run")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights and the problems")
    parser.add_argument("--digits", type=int, default=task.WIDTH, help="digits of each number")
    parser.add_argument("--train_rows", type=int, default=10000, help="training prompts")
    parser.add_argument("--test_rows", type=int, default=1000, help="held-out prompts")
    parser.add_argument("--sft_rows", type=int, default=600 * 32, help="demonstrations")
    args = parser.parse_args()
    task.WIDTH = args.digits
    hf_logging.disable_progress_bar()
    write_base(args.out / "base", args.seed)
    write_data(args.out / "data", args.seed, args.train_rows, args.test_rows, args.sft_rows)


if __name__ == "__main__":
    main()
