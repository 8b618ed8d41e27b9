"""What the examples of agents share: a tiny untrained model whose chat template shows tools, calls and results."""
import string
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AddedToken, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

sys.path.append(str(Path(__file__).parents[1] / "quickstart"))
from common import POSITIONS, text_config  # noqa: E402

SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
ROLES = ["system", "user", "assistant"]
CALL = ['{"name": "', '", "arguments": {"', '": ', ', "', "}}"]  # as a tokenizer that was trained on calls has them
CHARACTERS = "\n " + string.digits + string.ascii_letters + "+-*/=,.?!:;(){}[]'\"_"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool.function.name }}{{ ' ' if not loop.last }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}<|im_end|>{% endgeneration %}\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n{{ '<tool_response>' + m.content + '</tool_response>' }}"
    "<|im_end|>\n{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def build_tokenizer(words: Sequence[str]) -> Qwen2Tokenizer:
    """Build a tokenizer with one token per character, per mark of a call, and per word of ``words``."""
    letters = [character.replace("\n", "Ċ").replace(" ", "Ġ") for character in CHARACTERS]
    vocab = {token: i for i, token in enumerate(SPECIAL + letters)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>",
                               padding_side="left", chat_template=TEMPLATE, model_max_length=POSITIONS,
                               additional_special_tokens=["<|im_start|>"])  # yapf: disable
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False)
                          for word in [*MARKS, *ROLES, *CALL, *words]])  # yapf: disable
    return tokenizer


def write_base(folder: Path, seed: int, words: Sequence[str]) -> None:
    """Save an untrained Qwen2 of two layers and its tokenizer in HF format."""
    tokenizer = build_tokenizer(words)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**text_config(tokenizer)))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
