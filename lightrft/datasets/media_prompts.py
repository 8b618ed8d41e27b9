"""Prompts with pictures, videos and sounds: which media a row has, and the tokens that stand for them."""
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightrft.config.schema import DataConfig
from lightrft.datasets.media import KINDS, MediaError
from lightrft.datasets.media_rows import find_media, media_columns
from lightrft.datasets.rows import DataError, Rows
from lightrft.datasets.waveform import EXCESS_S
from lightrft.utils.logging import get_logger
from lightrft.utils.progress import phase
from lightrft.utils.prompt import Message, Prompt

if TYPE_CHECKING:  # a mistake in a row is found without torch
    from lightrft.datasets.media_store import MediaStore

Paired = tuple[list[Message], tuple[str, ...]]
AHEAD = 64  # rows whose media are processed in the background while others are tokenized


def with_media(rows: Rows, prompts: list[Prompt], cfg: DataConfig,
               store: "MediaStore | None") -> tuple[Rows, list[Prompt]]:
    """Pair the prompts of one entry with their media, which the store then knows; see :func:`pair_media`."""
    paired, columns = pair_media(rows, [prompt.chat for prompt in prompts], cfg, store), media_columns(cfg)

    def with_keys(prompt: Prompt, messages: list[Message], media: tuple[str, ...]) -> Prompt:
        rest = {name: value for name, value in prompt.columns.items() if name not in columns}
        return replace(prompt, text="", messages=messages, media=media, columns=rest) if media else prompt

    return rows.pick(paired), [with_keys(prompts[i], *chat) for i, chat in paired.items()]


def pair_media(rows: Rows, chats: list[list[Message]], cfg: DataConfig, store: "MediaStore | None",
               plain: Sequence[Sequence[str]] = ()) -> dict[int, Paired]:
    """Find, decode and process the media of the rows of one entry. A data set names those that it keeps to the store
    (:meth:`MediaStore.keep`).

    Args:
        chats: the messages of each row.
        store: None: the model takes text only.
        plain: texts of each row that go into no chat.

    Returns:
        By index of the row the messages, with a part for each medium, and the keys of the media. Rows with a medium
        that cannot be used on a rank, or that the model does not take, or with a token of media in a text, are left out
        and counted under ``--media_policy skip``.

    Raises:
        DataError: a medium cannot be used, under the policy "error"; no row is left; or a URL gave different bytes to
            two ranks.
    """
    takes = () if store is None else store.takes
    listed = find_media(rows, chats, cfg, takes, bool(takes) and cfg.system_prompt is not None)
    every = {i: each for i, each in enumerate(listed) if each is not None}
    if store is None:
        return {i: (messages, ()) for i, (messages, _) in every.items()}
    found = {i: (messages, store.register(media)) for i, (messages, media) in every.items()}
    _check_options(cfg, store)
    _leave_broken(found, rows, cfg, store, plain)
    if cut := sum(not store.cut.isdisjoint(keys) for _, keys in found.values()):
        get_logger().warning(f"{cut} of {len(rows)} rows have a sound that lasts up to {EXCESS_S:g} s longer than the "
                             "model processes: its end is cut off")
    if cfg.media_policy == "skip":
        _leave_broken_elsewhere(found, rows, store)
    if store.rules.urls:
        store.check_downloads(key for _, keys in found.values() for key in keys)
    if not found:
        raise DataError(f"{rows.where(0)}: no row has media that can be read")
    return found


def _leave_broken(found: dict[int, Paired], rows: Rows, cfg: DataConfig, store: "MediaStore",
                  plain: Sequence[Sequence[str]]) -> None:
    """Read the media of ``found``, and remove rows where that fails; under the policy "error" it is raised."""
    order, errors = list(found), []
    for number, i in enumerate(phase(order, "media", "row")):
        store.prefetch_texts(key for ahead in order[number:number + AHEAD] for key in found[ahead][1])
        try:
            store.check_words([*found[i][0], *({"content": text} for text in plain[i:i + 1] for text in text)],
                              rows.where(i))
            for key in found[i][1]:
                store.text(key)
        except MediaError as error:
            if cfg.media_policy == "error":
                raise
            errors.append(error)
            del found[i]
    if errors:
        get_logger().warning(f"{len(errors)} of {len(rows)} rows have media that cannot be read (the first: "
                             f"{errors[0]}): left out")


def _leave_broken_elsewhere(found: dict[int, Paired], rows: Rows, store: "MediaStore") -> None:
    """Remove the rows of ``found`` that another rank has left out, because a download or a file of its node failed: all
    ranks must have the same rows. A collective."""
    broken = {i for every in store.gather([i for i in range(len(rows)) if i not in found]) for i in every}
    if lost := sorted(broken & found.keys()):
        get_logger().warning(f"{len(lost)} of {len(rows)} rows have media that other ranks cannot read (the first: "
                             f"{rows.where(lost[0])}): left out")
    for i in lost:
        del found[i]


def _check_options(cfg: DataConfig, store: "MediaStore") -> None:
    """Refuse options that would write a placeholder or token of media into every prompt."""
    for name in ("system_prompt", "input_template"):
        text = vars(cfg)[name] or ""
        mark = next((mark for mark in (*store.tokens, *(f"<{kind}>" for kind in KINDS)) if mark in text), None)
        if mark is not None:
            raise DataError(f"--{name} holds {mark}, which stands for a picture, video or sound: only rows have these. "
                            "Remove it, and write it in the rows that have a medium")


def with_tokens(prompts: list[Prompt], rendered: list[tuple[str, list[int]]],
                store: "MediaStore | None") -> list[Prompt]:
    """Set the whole text and the tokens of prompts; every medium gets as many tokens as it has features.

    Args:
        rendered: text and tokens of each prompt, with one placeholder per medium.
    """

    def encoded(prompt: Prompt, text: str, ids: list[int]) -> Prompt:
        if store is None or not prompt.media:
            return replace(prompt, text=text, token_ids=ids)
        return replace(prompt, text=text, token_ids=store.encode(text, prompt.media), unexpanded_ids=ids)

    return [encoded(prompt, *each) for prompt, each in zip(prompts, rendered, strict=True)]
