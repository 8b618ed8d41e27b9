"""Prompt that a history of an environment takes the place of."""
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lightrft.datasets.media import MediaError
from lightrft.datasets.media_prompts import with_tokens
from lightrft.environments.base import Message
from lightrft.environments.chat_format import ChatFormat
from lightrft.environments.media import Pictures
from lightrft.types import Prompt
from lightrft.utils.play import Shown


def rewritten_prompt(prompt: Prompt, history: Sequence[Message], row_media: Sequence[str], form: ChatFormat,
                     pictures: Pictures) -> tuple[Prompt, list[Shown]]:
    """Return a prompt of the same row whose messages are ``history``, rendered as prompts are, and the pictures that
    these have themselves.

    Args:
        row_media: keys of the media of the row, for which parts without content stand.

    Raises:
        DataError: the template or the model's processor refuses the messages, or a part stands for no medium.
        UserError: there are pictures, and none are expected.
    """
    messages, shown = form.safe(history), pictures.in_messages(history)
    media = tuple(_keys(history, row_media, shown))
    rewritten = replace(prompt, messages=messages, media=media, unexpanded_ids=[])
    rewritten, = with_tokens([rewritten], [form.prompt(messages, prompt.template_kwargs)], pictures.store)
    return rewritten, shown


def _keys(history: Iterable[Message], row_media: Sequence[str], shown: Iterable[Shown]) -> Iterator[str]:
    """Yield the keys of the media of a history, in order."""
    of_row, of_environment = [*row_media], iter(shown)
    parts = (part for message in history if isinstance(message["content"], list) for part in message["content"])
    for part in (part for part in parts if part["type"] != "text"):
        if "data" in part:
            yield next(of_environment).key
            continue
        key = next((key for key in of_row if key.startswith(f"{part['type']}:")), None)
        if key is None:
            raise MediaError(f"a history has more parts {part} than its row has media of this kind: "
                             f"{', '.join(row_media) or 'none'}. Leave the part out, or give it a picture")
        of_row.remove(key)
        yield key


def news_in(history: Sequence[Message], said: Iterable[Message]) -> list[Message]:
    """Return the messages of a history that were not ``said`` before and are not of the assistant, whose turns a record
    has as they were drawn."""
    known, news = [(message["role"], message["content"]) for message in said], list[Message]()
    for message in history:
        if (one := (message["role"], message["content"])) in known:
            known.remove(one)
        elif message["role"] != "assistant":
            news.append(message)
    return news
