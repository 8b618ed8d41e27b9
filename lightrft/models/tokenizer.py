"""Loads tokenizers from a Hugging Face folder or hub id, exports them, and holds the built-in chat templates.

``generation`` in a template marks the tokens that the assistant wrote.
"""
import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoProcessor, AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from lightrft.models.generation_config import declared, fault, NAME, valid_part
from lightrft.models.config_json import logit_count, read_config, takes_media
from lightrft.utils.errors import did_you_mean, first_line, UserError
from lightrft.utils.hub import model_folder, read_pretrained
from lightrft.utils.logging import get_logger, warn_of_all

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
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


def load_tokenizer(path: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``path``; a missing pad token becomes eos (packed batches never pad, only exports name it).

    Args:
        path: HF folder or hub id.
        chat_template: a Jinja file, a processor's ``chat_template.json``, or a built-in name, in place of the
            tokenizer's own template.

    Raises:
        ValueError: no such folder, no tokenizer in it, no eos token, one that the model does not have, or an unknown or
            broken template.
    """
    folder = model_folder(path)
    if folder is not None and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        if not (folder / "config.json").is_file():
            inside = sorted(other.parent for other in folder.glob("*/config.json"))
            raise UserError(f"{path!r} holds no model: no config.json is there" +
                            (f" (did you mean {inside[0]}?)" if inside else "") +
                            "; give the folder of a Hugging Face model")
        raise UserError(
            f"{path!r} holds no tokenizer ({', '.join(TOKENIZER_FILES)}); copy the model's tokenizer files there")
    has_config = folder is None or (folder / "config.json").is_file()
    if folder is not None and has_config:
        read_config(path)  # the class of a tokenizer depends on it; what is wrong with it has words of its own
    try:
        tokenizer = read_pretrained(AutoTokenizer, folder or path)
    except (OSError, ValueError, KeyError) as error:
        absent = "" if folder else f"no such folder{_nearest(path)}, and on the hub: "
        raise UserError(f"cannot load the tokenizer of {path!r}: {absent}{first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {path!r} has no eos token, so responses could never end: set \"eos_token\" in its "
            "tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        get_logger().info(f"the tokenizer of {path} has no pad token: eos {tokenizer.eos_token!r} is used")
    if not tokenizer.chat_template and chat_template is None and folder is not None:
        own = folder / "chat_template.json"  # of the processor, in folders of older models
        tokenizer.chat_template = read_chat_template(str(own)) if own.is_file() else None
    if has_config:
        _check_ends(path, folder, tokenizer)
    if chat_template is not None:
        set_chat_template(tokenizer, chat_template)
    return tokenizer


def _check_ends(path: str, folder: Path | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse an end token of the tokenizer that the model does not have; warn of one of its generation config."""
    known, own = logit_count(path), int(tokenizer.eos_token_id)
    if own >= known:
        raise UserError(f"the tokenizer of {path!r} ends responses with {tokenizer.eos_token!r}, token {own}, which "
                        f"the model with its {known} tokens can neither draw nor read: copy the model's own tokenizer "
                        "files there, or set another \"eos_token\" in tokenizer_config.json")
    values = declared(path)
    if problem := fault(values):
        _, names = valid_part(values)
        warn_of_all(f"{NAME} of {path} is invalid ({problem}): exports leave out {', '.join(names)}")
    ends = values.get("eos_token_id")
    absent = [str(one) for one in (ends if isinstance(ends, list) else [ends]) if one and one >= known]
    if absent:
        warn_of_all(f"{NAME} of {path} names the end token {', '.join(absent)}, which the model with "
                    f"its {known} tokens does not have: responses end with the others, such as "
                    f"{tokenizer.eos_token!r}. Correct its eos_token_id")


def set_chat_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Give ``tokenizer`` the template ``name``, a file or a built-in one.

    Raises:
        ValueError: it is unknown or does not render.
    """
    tokenizer.chat_template = read_chat_template(name)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except (TemplateError, TypeError) as error:
        raise UserError(f"chat template {name!r} does not render: {first_line(error)}") from error


def _nearest(path: str) -> str:
    """Return a suggestion for the mistyped path of a folder, or an empty string."""
    home = Path(path).parent
    return did_you_mean(path, (str(other) for other in home.iterdir() if other.is_dir())) if home.is_dir() else ""


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, base: str) -> None:
    """Write ``tokenizer`` to the ``folder`` of a model; for vision and audio models also the processor of ``base``."""
    if tokenizer.is_fast:  # on a full disk this is an OSError; the tokenizers library raises a bare Exception
        (folder / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str(pretty=True), encoding="utf-8")
    tokenizer.save_pretrained(folder)
    if not takes_media(str(folder)):
        return
    try:
        processor: Any = read_pretrained(AutoProcessor, base)
    except (OSError, ValueError, ImportError) as error:
        get_logger().warning(f"the export has no processor, because the processor of {base} does not load: "
                             f"{first_line(error)}")
        return
    if tokenizer.chat_template != processor.tokenizer.chat_template:
        processor.chat_template = tokenizer.chat_template  # a template of --chat_template
    processor.tokenizer = tokenizer
    processor.save_pretrained(folder)


def read_chat_template(name: str) -> str:
    """Return the Jinja text of a file, or of a built-in name, or the text itself; otherwise raise a ``ValueError`` that
    lists the names."""
    if name in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[name]
    if "{{" in name:
        return name
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(
            f"unknown chat template {name!r}: not a file, and not one of {', '.join(sorted(CHAT_TEMPLATES))}")
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return text
    try:
        return str(json.loads(text)["chat_template"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"chat template {name!r}: no JSON with the key 'chat_template'. Give a Jinja file") from error
