"""What the quickstarts share: a tokenizer of characters, and the command line that fills the folder of a run."""
import argparse
import re
import string
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AddedToken, logging as hf_logging, Qwen2Tokenizer

SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = ["<think>", "</think>", "\\boxed{"]
CHARACTERS = "\n W" + string.digits + string.ascii_lowercase + "+-*/=,.?!:;(){}'\"%$"
POSITIONS = 2048  # rotary, so they cost nothing; the problems of examples/gsm8k_geo3k fit too
CHAT_TEMPLATE = ("{% for message in messages %}{% if message['role'] == 'assistant' %}"
                 "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
                 "{% elif message['content'] is string %}{{ message['content'] + '\n' }}"
                 "{% else %}{% for part in message['content'] %}"
                 "{{ part['text'] if part['type'] == 'text' else 'MEDIUM' }}{% endfor %}{{ '\n' }}"
                 "{% endif %}{% endfor %}")


def build_tokenizer(medium: str = "", marks: tuple[str, ...] = ()) -> Qwen2Tokenizer:
    """Build a tokenizer with one token per character and per tag, 64 in all; a question ends with a newline, an answer
    with ``<eos>``.

    It is Qwen2's byte-level BPE without merges, because ``AutoTokenizer`` forces that class on folders that hold a
    Qwen2 model.

    Args:
        medium: what the chat template writes for a picture or a sound, e.g. ``<|vision_start|><|image_pad|>...``.
        marks: further special tokens, besides those in ``medium``.
    """
    letters = CHARACTERS.replace("\n", "Ċ").replace(" ", "Ġ")
    vocab = {token: i for i, token in enumerate(SPECIAL + WORDS + list(letters))}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
                               padding_side="left", chat_template=CHAT_TEMPLATE.replace("MEDIUM", medium),
                               model_max_length=POSITIONS)  # yapf: disable
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in WORDS])
    tokenizer.add_tokens([*re.findall(r"<\|\w+\|>", medium), *marks], special_tokens=True)
    return tokenizer


def text_config(tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    """Return the sizes of a language model of two layers, for a Qwen2 config."""
    return dict(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=256, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=POSITIONS,
                tie_word_embeddings=True, initializer_range=0.1, bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)  # yapf: disable


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def command_line(description: str | None, out: str, rows: tuple[int, int, int]) -> argparse.ArgumentParser:
    """Build the options of a ``prepare.py``; ``rows`` are the training and held-out prompts and demonstrations."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help="folder of the run")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights and the problems")
    parser.add_argument("--train_rows", type=int, default=rows[0], help="training prompts")
    parser.add_argument("--test_rows", type=int, default=rows[1], help="held-out prompts")
    parser.add_argument("--sft_rows", type=int, default=rows[2], help="demonstrations")
    return parser


def write_folder(args: argparse.Namespace, write_base: Callable[[Path, int], None], task: ModuleType) -> None:
    """Write OUT/base with ``write_base(folder, seed)`` and OUT/data with the rows of ``task``."""
    hf_logging.disable_progress_bar()
    write_base(args.out / "base", args.seed)
    data = args.out / "data"
    write_rows(data / "train.parquet", task.prompt_rows(args.train_rows, "train", args.seed))
    write_rows(data / "test.parquet", task.prompt_rows(args.test_rows, "test", args.seed))
    write_rows(data / "sft.parquet", task.demonstration_rows(args.sft_rows, args.seed))
