"""Chat templates of four families that call tools, with their control tokens, and one token per byte for the rest.

The templates are short ones of our own. They have what decides about tokens in those of the families: the marks, the
places of line breaks, thoughts that leave the history, results written as JSON, and what they refuse.
"""
from typing import NamedTuple

from transformers import AddedToken, PreTrainedTokenizerBase, Qwen2Tokenizer

from lightrft.tests.support import tiny

_QWEN = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}\n"
    "</tools>"
    "<|im_end|>\n{% endif %}{% set ns = namespace(asked=0) %}"
    "{% for m in messages if m.role == 'user' %}{% set ns.asked = ns.asked + 1 %}{% endfor %}"
    "{% set now = namespace(asked=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set now.asked = now.asked + 1 %}{% endif %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if m.reasoning_content and now.asked == ns.asked %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}"
    "{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}"
    "{% endif %}{{ '<tool_call>\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' }}"
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
_LLAMA = (
    "{% macro turn(role, text) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + text + '<|eot_id|>' }}"
    "{% endmacro %}{{ '<|begin_of_text|>' }}{{ turn('system', 'Today Date: 26 Jul 2024\n\n') }}"
    "{% for m in messages %}{% if m.role in ('tool', 'ipython') %}{{ turn('ipython', m.content | tojson) }}"
    "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "{{ turn('assistant', '{\"name\": \"' + f.name + '\", \"parameters\": ' + f.arguments | tojson + '}') }}"
    "{% elif loop.first and tools %}{{ '<|start_header_id|>user<|end_header_id|>\n\nRespond in the format "
    "{\"name\": function name, \"parameters\": dictionary}.\n\n' }}{% for t in tools %}{{ t | tojson + '\n\n' }}"
    "{% endfor %}{{ m.content | trim + '<|eot_id|>' }}"
    "{% else %}{{ turn(m.role, m.content | trim) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
_HARMONY = (
    "{{ '<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>' }}"
    "{% if tools %}{{ '<|start|>developer<|message|># Tools\n\nnamespace functions {' }}"
    "{% for t in tools %}{{ '\n// ' + t.function | tojson }}{% endfor %}{{ '\n}<|end|>' }}{% endif %}"
    "{% set last = namespace(call=none) %}{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% set later = namespace(final=false) %}{% for n in messages[loop.index:] %}"
    "{% if n.role == 'assistant' and not n.tool_calls %}{% set later.final = true %}{% endif %}{% endfor %}"
    "{% if m.thinking and not later.final %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{% set last.call = m.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant to=functions.' + last.call + '<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson + '<|call|>' }}"
    "{% elif m.role == 'assistant' %}{% set ends = loop.last and not add_generation_prompt %}"
    "{% if ends and m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
    "{% endif %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if ends else '<|end|>' }}{% set last.call = none %}"
    "{% elif m.role == 'tool' %}{% if not last.call %}"
    "{{ raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}"
    "{% endif %}{{ '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ m.content | tojson + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}")

_LFM2 = ("{{ '<|startoftext|>' }}{% if tools %}<|im_start|>system\nList of tools: [{% for t in tools %}{{ t | tojson }}"
         "{% if not loop.last %}, {% endif %}{% endfor %}]<|im_end|>\n{% endif %}"
         "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'tool' %}"
         "{{ '<|tool_response_start|>' + m.content + '<|tool_response_end|>' }}{% else %}{{ m.content }}{% endif %}"
         "{% for call in m.tool_calls or [] %}{{ '<|tool_call_start|>[' if loop.first else ', ' }}"
         "{{ call.function.name + '(' }}{% for name, value in call.function.arguments.items() %}"
         "{{ ', ' if not loop.first }}{{ name + '=' }}{% if value is string %}{{ \"'\" + value + \"'\" }}"
         "{% else %}{{ value | tojson }}{% endif %}{% endfor %}{{ ')' }}"
         "{{ ']<|tool_call_end|>' if loop.last }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


class ChatFamily(NamedTuple):
    """A family: its model type, its template, its special tokens, the end token first, and its other added tokens."""
    model_type: str
    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()


FAMILIES = {
    "qwen": ChatFamily("qwen3", _QWEN, ("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
                       ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")),
    "llama": ChatFamily("llama", _LLAMA, ("<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
                                          "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")),
    "harmony": ChatFamily("gpt_oss", _HARMONY, ("<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|message|>",
                                                "<|channel|>", "<|constrain|>", "<|endoftext|>")),
    "lfm2": ChatFamily("lfm2", _LFM2, ("<|im_end|>", "<|im_start|>", "<|startoftext|>", "<|endoftext|>",
                                       "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_response_start|>",
                                       "<|tool_response_end|>")),
}  # yapf: disable


def tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a family: a byte each, and its marks."""
    family, plain = FAMILIES[name], tiny.tokenizer()
    letters = [token for token, _ in sorted(plain.get_vocab().items(), key=lambda each: each[1])
               if not token.startswith("<|im_")]  # yapf: disable
    made = Qwen2Tokenizer(vocab={token: i for i, token in enumerate([*letters, *family.special])}, merges=[],
                          pad_token="<pad>", unk_token="<unk>", eos_token=family.special[0],
                          additional_special_tokens=list(family.special[1:]), chat_template=family.template)
    made.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in family.added])
    return made


DRAWN = "zyx"  # in turns that tests draw, and nowhere else


class Guarded:
    """A tokenizer that raises when it is given a text that was drawn."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def encode(self, text, *args, **kwargs):
        assert DRAWN not in text, f"drawn text is encoded again: {text!r}"
        return self.tokenizer.encode(text, *args, **kwargs)

    def __call__(self, texts, *args, **kwargs):
        assert DRAWN not in str(texts), f"drawn text is encoded again: {texts!r}"
        return self.tokenizer(texts, *args, **kwargs)
