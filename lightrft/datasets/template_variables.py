"""Variables that a chat template reads: those that options set for it must be among them."""
from collections.abc import Mapping, Sequence
from typing import Any, TYPE_CHECKING

from jinja2 import Environment, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser

from lightrft.datasets.rows import DataError
from lightrft.datasets.template_kwargs import given_by_rendering

if TYPE_CHECKING:  # a mistake in a row is found without torch
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


class _Generation(Extension):
    """Parses ``{% generation %}``, the block of transformers around what the assistant writes."""
    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        """Return the content of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration", ), drop_needle=True)


_FUNCTIONS = {"raise_exception", "strftime_now"}  # of transformers
_SYNTAX = Environment(extensions=[loopcontrols, _Generation])


def variables_of(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """Return the names that the chat templates of a tokenizer look up, without those of Jinja; also messages, tools and
    tokens. A broken template has none."""
    templates = tokenizer.chat_template or ""
    texts = templates.values() if isinstance(templates, dict) else [templates]
    try:
        names = set[str]().union(*(find_undeclared_variables(_SYNTAX.parse(text)) for text in texts))
    except TemplateError:  # rendering says where
        return set()
    return names - _SYNTAX.globals.keys()


def check_read(values: Mapping[str, Any], tokenizers: Sequence["PreTrainedTokenizerBase"]) -> None:
    """Refuse variables of ``--chat_template_kwargs`` that no template of ``tokenizers`` reads.

    Raises:
        DataError: names them, and the variables that the templates read.
    """
    names = set[str]().union(*map(variables_of, tokenizers))
    if unread := sorted(values.keys() - names):
        paths = " or ".join(repr(tokenizer.name_or_path) for tokenizer in tokenizers)
        raise DataError(f"--chat_template_kwargs sets {', '.join(unread)}, which the chat template of {paths} does not "
                        f"read. {_known(names)} Correct or remove it; in the column chat_template_kwargs "
                        "of a row a template may leave a variable alone")


def _known(names: set[str]) -> str:
    own = [name for name in sorted(names - given_by_rendering() - _FUNCTIONS) if not name.endswith("_token")]
    return f"It reads {', '.join(own)}." if own else "It reads no variable."
