"""Tiny models that call tools: one token per character, the tokens of Qwen3 and templates that show tools and results.
"""
from pathlib import Path

from transformers import AddedToken, GenerationConfig, PreTrainedTokenizerBase, Qwen2Tokenizer

from lightrft.tests.support import tiny

TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def tokenizer() -> PreTrainedTokenizerBase:
    """The tokenizer of :func:`tiny.tokenizer` with the tags of calls, results and thoughts, which are added tokens and
    not special, as in Qwen3."""
    plain = tiny.tokenizer()
    vocab = dict(plain.get_vocab()) | {"<|endoftext|>": len(plain)}
    made = Qwen2Tokenizer(vocab=vocab, merges=[], pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>",
                          additional_special_tokens=["<|im_start|>", "<|endoftext|>"], chat_template=TEMPLATE)
    made.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return made


def save_model(folder: Path | str, family: str = "qwen3", seed: int = 0, **overrides) -> Path:
    """Write a tiny model of ``family`` that knows the tokens, as a download would look; returns its folder."""
    path, tok = Path(folder), tokenizer()
    model = tiny.model(family, seed, vocab_size=len(tok), **overrides)
    model.generation_config = GenerationConfig(eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    model.save_pretrained(path)
    tok.save_pretrained(path)
    return path
