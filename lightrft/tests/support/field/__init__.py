"""Small inputs after public bug reports of other trainers, with details replaced: rows, rewards, a data folder, models.

``rows/`` and ``rewards/`` are files as users have them. What is no text is written by the functions of this module. The
tests that use an input say what is right for it.
"""
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

ROWS, REWARDS = Path(__file__).parent / "rows", Path(__file__).parent / "rewards"
TEXT = "What is 12+30? The answer is \\boxed{42}. get_weather city Oslo user assistant tool arguments name"
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for call in m.tool_calls or [] %}\
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
"""Chats with tools, calls of them, and thoughts that a keyword leaves empty. Only texts are contents."""


def rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of ``rows/NAME.jsonl``."""
    return [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def field_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the end token ``<|im_end|>`` and a chat template."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT] * 20, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    made.add_special_tokens([AddedToken(name, special=name.startswith("<|"), normalized=False) for name in MARKERS])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   chat_template=template)


def write_model(folder: Path, kind: str, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Write a tiny causal model with sharp random weights, so that a wrong position shows.

    Args:
        kind: model type of transformers.
        generation: content of ``generation_config.json``; None: the end token alone.
        changes: of its config.
    """
    tokenizer = field_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id
    }  # yapf: disable
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | changes), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.25)
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation or {"eos_token_id": tokenizer.eos_token_id}))
    return folder


def write_longrope(folder: Path) -> Path:
    """Write a Phi-3 whose frequencies change for sequences of more than 64 tokens."""
    factors = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 9.0, 20.0],
        "original_max_position_embeddings": 64, "factor": 8.0
    }  # yapf: disable
    return write_model(folder, "phi3", original_max_position_embeddings=64, rope_parameters=factors)


def write_dynamic_rope(folder: Path) -> Path:
    """Write a Llama whose frequencies grow with the length of sequences of more than 64 tokens."""
    return write_model(folder, "llama", max_position_embeddings=64,
                       rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0})  # yapf: disable


def write_padded_arguments(file: Path) -> Path:
    """Write two calls of different tools as parquet, which gives each call the arguments of both, null where absent."""

    def called(name: str, **arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        asked = {"role": "user", "content": "Do it."}
        return {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]}

    pq.write_table(pa.Table.from_pylist([called("get_weather", city="Oslo"), called("add", a=1, b=2)]), file)
    return file


def write_folder(folder: Path) -> Path:
    """Write a data folder with three rows, "new 0" to "new 2", and a copy of older ones as Jupyter leaves it."""
    hidden = folder / ".ipynb_checkpoints"
    hidden.mkdir(parents=True)
    for file, text, answer in ((hidden / "train-checkpoint.jsonl", "OLD", "2"), (folder / "train.jsonl", "new", "1")):
        file.write_text("".join(f'{{"prompt": "{text} {i}", "answer": "{answer}"}}\n' for i in range(3)))
    return folder
