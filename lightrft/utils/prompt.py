"""Prompt: a row of a data set, from its reading to the model. Nothing here imports torch: a mistake in a row is found
without it."""
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One row of a data set; the same for every modality.

    As it is read it has a ``text`` or ``messages``, and no tokens. A data set renders and tokenizes it: then ``text``
    and ``token_ids`` are the whole prompt, and ``messages`` those of a chat. ``columns`` are all other columns of the
    row, for rewards.

    ``media`` are keys (``image:`` and a hash, say) of its pictures, videos and sounds, in the order of their
    appearance. What they name is decoded and processed where it is used, and never sent to other ranks. In
    ``token_ids`` every medium has as many tokens as it has features; in ``text`` and ``unexpanded_ids``, for engines
    that process media themselves, it has one placeholder. ``template_kwargs`` are those with which a chat template
    renders the messages (tools, say), for models with a template of their own.
    """
    uid: str  # as it is read, the id that the row has
    token_ids: list[int]
    text: str
    messages: list[Message] = field(default_factory=list)
    data_source: str = ""
    label: str = ""
    reference: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    media: tuple[str, ...] = ()
    unexpanded_ids: list[int] = field(default_factory=list)  # empty without media
    template_kwargs: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def asked(self) -> str | list[Message]:
        """Question of the row, before it is rendered: its messages, else its text."""
        return self.messages or self.text

    @property
    def chat(self) -> list[Message]:
        """Question of the row as a chat, before it is rendered; a text is one turn of the user."""
        return self.messages or [{"role": "user", "content": self.text}]
