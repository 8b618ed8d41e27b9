"""Training rows from scored responses: rejection sampling, conditional SFT and pairs for iterative DPO.

Input rows have ``input``, ``output`` and ``reward`` (None: unscored), as :mod:`lightrft.inference.generation` writes
them. The columns of the result are those of OpenRLHF's batch inference.
"""
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from lightrft.datasets.prompt_rows import missing
from lightrft.inference.row_files import Row
from lightrft.utils.errors import UserError

Counts = Counter[str]
PLAY, TURNS = "play", "messages"  # columns of a response of an environment: what that did, and the whole chat
MEDIA = "prompt"  # column of the messages of a prompt with media, which training reads in place of ``input``


def normalise_rewards(rows: list[Row]) -> list[Row]:
    """Shift and scale the rewards to mean 0 and (Bessel-corrected) deviation 1 over all scored rows.

    Raises:
        UserError: fewer than two differ.
    """
    values = [row["reward"] for row in rows if row.get("reward") is not None]
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    if not deviation:
        raise UserError(f"--normalize_reward: the {len(values)} rewards are all equal and cannot be normalized; drop "
                        "it, or use a reward that distinguishes responses")
    mean = statistics.fmean(values)
    return [row if row.get("reward") is None else row | {"reward": (row["reward"] - mean) / deviation} for row in rows]


def truncated(row: Row) -> bool:
    """Return True if the ``finish_reason`` of a response says, in the words of an engine or an API, that it was cut."""
    reason = row.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, dict) else reason  # SGLang
    return str(reason).lower() in ("length", "max_tokens", "max_length")


def rejection_sampling(rows: list[Row], counts: Counts, keep_truncated: bool = False) -> list[Row]:
    """Return the best response to each prompt; of several with the best reward the first. A :func:`truncated` response
    would teach to end in the middle of a sentence: it takes part only on request."""
    best, whole = [], [row for row in rows if keep_truncated or not truncated(row)]
    counts["truncated responses left out"] += len(rows) - len(whole)
    for group in _groups(whole, counts):
        chosen = max(group, key=lambda row: row["reward"])  # the first of equals
        counts["ties for the best response"] += sum(row["reward"] == chosen["reward"] for row in group) > 1
        kept: Row = {name: chosen[name] for name in ("output", "reward", "finish_reason") if name in chosen}
        best.append(_of_turns(chosen, kept) if PLAY in chosen else _of_input(chosen, kept))
    return best


def conditional_sft(rows: list[Row], counts: Counts, template: str, wish: str = "") -> list[Row]:
    """Return every response with its reward, to two digits, in its prompt, in place of the ``wish`` at its end.

    Raises:
        UserError: a prompt has media, so that it is a chat, which a template of text cannot hold.
    """
    found = []
    for row in (row for group in _groups(rows, counts) for row in group):
        if PLAY in row:
            raise UserError("--post_processor csft: writes the reward into the text of a prompt, and the responses are "
                            "chats of several turns; use rs or iter_dpo")
        if MEDIA in row:
            raise UserError("--post_processor csft: writes the reward after the text of a prompt, and the prompts are "
                            "chats, with media or without the template of a model; use rs or iter_dpo, or name the "
                            "reward model with --pretrain")
        asked = row["input"].removesuffix(wish)
        conditioned = template.replace("{reward}", f"{row['reward']:.2f}").replace("{input}", asked)
        found.append({"input": conditioned, "output": row["output"], "reward": row["reward"]})
    return found


def preference_pairs(rows: list[Row], counts: Counts, min_gap: float = 0.0) -> list[Row]:
    """Return the best and the worst response to each prompt; none where their rewards are equal, or closer than
    ``min_gap``."""
    pairs = []
    for group in _groups(rows, counts):
        best, worst = (pick(group, key=lambda row: row["reward"]) for pick in (max, min))
        gap = best["reward"] - worst["reward"]
        if gap == 0 or gap < min_gap:
            counts["prompts without a pair: " + ("one response" if len(group) == 1 else "equal rewards" if gap == 0 else
                                                 "rewards closer than --min_reward_gap")] += 1  # yapf: disable
            continue
        pairs.append(_of_prompt(best, {
            "chosen": _answer(best), "chosen_reward": best["reward"],
            "rejected": _answer(worst), "rejected_reward": worst["reward"]}))  # yapf: disable
    return pairs


def post_process(name: str, rows: list[Row], template: str, wish: str = "", keep_truncated: bool = False,
                 min_gap: float = 0.0) -> tuple[list[Row], Counts]:
    """Return the rows of the post-processor ``name``, and the number of what was left out or decided by order.

    Args:
        template: prompt of ``csft``.
        wish: end of the prompts of the rows, see :class:`lightrft.config.inference_schema.WishConfig`.
        keep_truncated: truncated responses take part in ``rs``.
        min_gap: of the rewards of a pair of ``iter_dpo``.

    Raises:
        UserError: no row is left.
    """
    if any(turn["role"] == "environment" for row in rows if PLAY in row for turn in row[TURNS]):
        raise UserError(f"--post_processor {name}: the environment of the responses writes text, with marks of a "
                        "template, which is no message of a chat. Use an environment that answers with messages")
    counts = Counts()
    processors: dict[str, Callable[[], list[Row]]] = {
        "rs": lambda: rejection_sampling(rows, counts, keep_truncated),
        "iter_dpo": lambda: preference_pairs(rows, counts, min_gap),
        "csft": lambda: conditional_sft(rows, counts, template, wish)
    }  # yapf: disable
    found = processors[name]()
    if not found:
        causes = ", ".join(f"{count} {cause}" for cause, count in (+counts).items()) or "there is no response"
        raise UserError(f"--post_processor {name}: no row is left of {len(rows)} responses ({causes})")
    return found, +counts


def _groups(rows: Iterable[Row], counts: Counts) -> Iterable[list[Row]]:
    """Group the scored responses by prompt, in the order of the first; the same response is taken once, and one without
    text, from which no trainer learns, never."""
    groups: dict[Any, dict[str, Row]] = {}
    for row in rows:
        if row.get("reward") is None or not math.isfinite(row["reward"]):
            counts["unscored responses"] += 1
            continue
        if missing(row["output"]):
            counts["empty responses"] += 1
            continue
        group = groups.setdefault(row["prompt_id"] if MEDIA in row and "prompt_id" in row else row["input"], {})
        counts["repeated responses"] += row["output"] in group
        group.setdefault(row["output"], row)
    return [list(group.values()) for group in groups.values()]


def _answer(row: Row) -> Any:
    """Return a response; one of several turns as messages."""
    return row[TURNS][-len(row[PLAY]["messages"]):] if PLAY in row else row["output"]


def _of_turns(row: Row, values: Row) -> Row:
    """Return a chat for SFT, which learns the turns of the policy alone, with ``values`` but for the text of it."""
    return {TURNS: row[TURNS], **_tools(row), **{name: value for name, value in values.items() if name != "output"}}


def _of_input(row: Row, values: Row) -> Row:
    """Return the columns of a prompt for SFT, with ``values``."""
    return {"input": row["input"], **_media(row), **values}


def _of_prompt(row: Row, values: Row) -> Row:
    """Return the columns of a prompt for preferences, with ``values``."""
    if PLAY in row:
        return {"prompt": row[TURNS][:-len(row[PLAY]["messages"])], **_tools(row), **values}
    return {"prompt": row["input"], **_media(row), **values}


def _tools(row: Row) -> Row:
    """Return the column of the schemas of tools, where the row has any."""
    return {"tools": row["tools"]} if row.get("tools") else {}


def _media(row: Row) -> Row:
    return {name: row[name] for name in (MEDIA, "images", "videos", "audios") if MEDIA in row and name in row}
