"""Chat templates that a user can name instead of giving a Jinja file. ``generation`` marks what the assistant wrote."""
from pathlib import Path

from lightrft.utils.errors import UserError

_CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
           "{% generation %}{{ m['content'] + END }}{% endgeneration %}{{ '\n' }}{% else %}"
           "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
_PLAIN = ("{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'Assistant: ' }}"
          "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{{ '\n' }}{% elif m['role'] == 'user' %}"
          "{{ 'User: ' + m['content'] + '\n' }}{% else %}{{ m['content'] + '\n' }}{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}")
_RAW = ("{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}"
        "{% endif %}{% endfor %}")

CHAT_TEMPLATES = {
    "chatml": _CHATML.replace("END", "'<|im_end|>'"),
    "plain": _PLAIN,  # User: ... / Assistant: ...
    "raw": _RAW,  # the texts alone, one after another; answers end with eos
}


def read_chat_template(name: str) -> str:
    """The Jinja text of a file, or of a built-in name; otherwise a ``ValueError`` that lists the names."""
    if name in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(
            f"unknown chat template {name!r}: not a file, and not one of {', '.join(sorted(CHAT_TEMPLATES))}")
    return path.read_text(encoding="utf-8")
