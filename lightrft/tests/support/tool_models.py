"""Tiny models that call tools: one token per character, the tokens of Qwen3 and templates that show tools and results.
"""
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AddedToken, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen2Tokenizer

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
    tok = tokenizer()
    return _saved(Path(folder), tiny.model(family, seed, vocab_size=len(tok), **overrides), tok)


def save_chain(folder: Path | str, turns: Sequence[Sequence[str]]) -> Path:
    """Write a policy whose next token depends on the last one alone, so that it draws one of ``turns`` as often as any
    other: each is a list of tokens, which the tokenizer gets.

    Embeddings are one-hot, layers add nothing, and the head has the weights of the steps from token to token.
    """
    path, tok = Path(folder), tokenizer()
    tok.add_tokens([AddedToken(word, normalized=False, special=False)
                    for word in dict.fromkeys(word for turn in turns for word in turn)
                    if len(tok.encode(word, add_special_tokens=False)) > 1])  # yapf: disable
    model = tiny.model("qwen3", 0, vocab_size=len(tok), hidden_size=-(-len(tok) // 8) * 8, num_hidden_layers=1,
                       max_position_embeddings=2048, tie_word_embeddings=False)
    with torch.no_grad():
        for weight in (model.lm_head.weight, *(layer.self_attn.o_proj.weight for layer in model.model.layers),
                       *(layer.mlp.down_proj.weight for layer in model.model.layers)):
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tok), model.config.hidden_size))
        for turn in turns:
            for last, following in pairwise(["\n", *turn, tok.eos_token]):
                model.lm_head.weight[_id(tok, following), _id(tok, last)] = 2.0
    return _saved(path, model, tok)


def _id(tok: PreTrainedTokenizerBase, token: str) -> int:
    (number, ) = tok.encode(token, add_special_tokens=False)
    return number


def _saved(path: Path, model: PreTrainedModel, tok: PreTrainedTokenizerBase) -> Path:
    model.generation_config = GenerationConfig(eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    model.save_pretrained(path)
    tok.save_pretrained(path)
    return path
