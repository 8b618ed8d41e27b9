"""Prompt with the messages of ``reset`` behind its own."""
from collections.abc import Sequence
from dataclasses import replace

from lightrft.datasets.media_prompts import with_tokens
from lightrft.datasets.rows import DataError
from lightrft.environments.base import Failure, Message, Step
from lightrft.environments.chat_format import ChatFormat
from lightrft.environments.media import Pictures
from lightrft.environments.rewritten_prompt import rewritten_prompt
from lightrft.types import Prompt
from lightrft.utils.play import NO_START, Shown


def opened_prompt(prompt: Prompt, answer: Step, form: ChatFormat | None, pictures: Pictures, most_tokens: int,
                  continues: bool) -> "tuple[Prompt, list[Shown]] | Failure":
    """Return a prompt with the messages of ``reset``, and their pictures, or with its text or its history in place of
    its own; or why it cannot have them.

    Args:
        continues: a first message of the user continues the last one of the prompt.
    """
    where = f"the prompt {prompt.uid!r} with the messages of reset()"
    try:
        opened, shown = _opened(prompt, answer, form, pictures, continues)
        if len(shown) > pictures.most:
            return Failure(NO_START, f"{where} has {len(shown)} of its pictures, and --env_images is {pictures.most}. "
                           "Raise it, or show fewer")  # yapf: disable
    except DataError as error:  # the template or the model's processor refuses them
        return Failure("exception", f"{where}: {error}")
    if (size := len(opened.token_ids)) > most_tokens:
        return Failure(NO_START, f"{where} has {size} tokens, and --prompt_max_len is {most_tokens}. Raise it, or "
                       "shorten the messages")  # yapf: disable
    return opened, shown


def _opened(prompt: Prompt, answer: Step, form: ChatFormat | None, pictures: Pictures,
            continues: bool) -> tuple[Prompt, list[Shown]]:
    if answer.text:
        return _with_text(prompt, answer.text, pictures), []
    assert form is not None, "texts alone are read without one"
    if answer.history:
        return rewritten_prompt(prompt, answer.history, prompt.media, form, pictures)
    shown = pictures.of(answer)
    return _with_messages(prompt, answer, form, pictures, [one.key for one in shown], continues), shown


def _with_text(prompt: Prompt, text: str, pictures: Pictures) -> Prompt:
    """Return a prompt with another text. That of a chat has all marks, and that of a plain prompt no first token."""
    encoder = pictures.encoder
    ids, = (encoder.tokenizer([text], add_special_tokens=False, verbose=False).input_ids
            if prompt.messages else encoder.encode_text([text]))  # yapf: disable
    opened, = with_tokens([prompt], [(text, ids)], pictures.store)
    return opened


def _with_messages(prompt: Prompt, answer: Step, form: ChatFormat, pictures: Pictures, keys: Sequence[str],
                   continues: bool) -> Prompt:
    messages = answer.messages or []
    assert not isinstance(messages, str), "the worker has made messages of it"
    every = _behind(prompt.messages, form.safe(messages), continues)
    opened = replace(prompt, messages=every, media=(*prompt.media, *keys))
    opened, = with_tokens([opened], [form.prompt(every, prompt.template_kwargs)], pictures.store)
    return opened


def _behind(prompt: Sequence[Message], opened: list[Message], continues: bool) -> list[Message]:
    """Return the messages of a prompt and those of ``reset``; with ``continues``, one of the user there is a part of
    the one before it."""
    if not continues or prompt[-1]["role"] != opened[0]["role"]:
        return [*prompt, *opened]
    first, second = prompt[-1]["content"], opened[0]["content"]
    if isinstance(first, list) or isinstance(second, list):
        first, second = ([{"type": "text", "text": each}] if isinstance(each, str) else each
                         for each in (first, second))  # yapf: disable
    return [*prompt[:-1], prompt[-1] | {"content": first + second}, *opened[1:]]
