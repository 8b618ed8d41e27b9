"""Weights of the tokens of conversations whose turns are marked: how much each token counts in the gradient."""
from collections.abc import Callable
from dataclasses import replace

from lightrft.datasets.conversations import Conversation, Encoded
from lightrft.datasets.rows import DataError

Weighted = tuple[list[int], list[bool], list[float]]


def marked_turns(chat: Conversation) -> list[int]:
    """Return the indices of the turns that may be in the loss and have another weight than 1."""
    return [i for i, turn in enumerate(chat.messages or []) if i >= chat.first and "weight" in turn]


def weigh(chats: list[Conversation], encoded: list[Encoded],
          encode: Callable[[list[Conversation]], list[Encoded]]) -> list[Weighted]:
    """Add the weights of the tokens to encoded conversations; empty: all are 1. Tokens of weight 0 leave the loss.

    Args:
        encode: tokenizes conversations, with the loss mask of a single turn (``only``).
    """
    marks = [(i, turn) for i, chat in enumerate(chats) for turn in marked_turns(chat)]
    weights = {i: [1.0] * len(encoded[i][0]) for i, _ in marks}
    turns = [replace(chats[i], only=turn) for i, turn in marks]
    for (i, turn), (_, mask) in zip(marks, encode(turns) if turns else ()):
        value = (chats[i].messages or [])[turn]["weight"]
        weights[i] = [value if keep else weight for keep, weight in zip(mask, weights[i])]
    return [(ids, [keep and weight > 0 for keep, weight in zip(mask, weights.get(i, [1.0] * len(mask)))],
             weights.get(i, [])) for i, (ids, mask) in enumerate(encoded)]  # yapf: disable


def check_unweighted(chat: Conversation, where: str) -> None:
    """Raise a :class:`DataError` for a mark on the last turn of an answer that is compared or judged as a whole, and
    for other weights than 0 in it."""
    marked = {turn: (chat.messages or [])[turn]["weight"] for turn in marked_turns(chat)}
    last = len(chat.messages or []) - 1
    wrong = next((turn for turn, weight in marked.items() if turn == last or weight), None)
    if wrong is not None:
        raise DataError(f"{where}: the mark of turn {wrong + 1} gives it the weight {marked[wrong]:g}: an answer is "
                        "compared or judged as a whole, up to its last turn, and turns before that count 1 or 0. "
                        "Remove the mark, or the row")
