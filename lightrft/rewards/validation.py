"""Checks before training: each reward scores a known-good answer above a known-bad one, and rewards can differ."""
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf

from lightrft.datasets.rows import DataError
from lightrft.rewards.base import RewardInput, Score
from lightrft.rewards.manager import RewardManager, Weighted
from lightrft.rewards.references import ReferenceFormError
from lightrft.rewards.rules import check_reference, FAST, normalise, plain_number, reference_answers, TAGGED
from lightrft.rewards.workers.user_file import EXPECTED, unfilled
from lightrft.utils.errors import UserError
from lightrft.utils.logging import one_rank_warns, warn_of_all
from lightrft.utils.play import Play


class RewardProbeError(UserError):
    """A reward gives no learning signal: it prefers the wrong answer, sees no difference, or scores nothing."""


def probe(manager: RewardManager, rows: list[RewardInput]) -> list[Score]:
    """Try each distinct reward of ``rows`` on one row (one with a reference, where there is one); return the scores.

    Raises ``ValueError`` for a row without a reward, and ``RewardProbeError`` as :func:`check_references`, when nothing
    could be scored, or when the built-in parts do not score the known-good answer above the known-bad one. Rewards of
    users only cause a warning in that case.
    """
    check_references(manager, rows)
    chosen: dict[tuple[str, ...], RewardInput] = {}
    for row in rows:
        kind = tuple(part.name for part, _ in manager.parts_of(row))
        if "environment" in kind:
            continue  # it judges what an environment has seen
        if kind not in chosen or (chosen[kind].reference is None and row.reference is not None):
            chosen[kind] = row
    with one_rank_warns("rewards"):
        return [score for row in chosen.values() for score in _probe_row(manager, row)]


def check_references(manager: RewardManager, rows: Iterable[RewardInput]) -> None:
    """Raise a :class:`RewardProbeError` for a reference in a form that a built-in part of its row cannot read: each
    response would be unscored, or wrong. So it does for a function with a parameter that nothing can fill."""
    check_columns(manager, _with_readable_references(manager, rows))


def check_columns(manager: RewardManager, rows: Iterable[RewardInput], every: bool = True) -> None:
    """Raise a :class:`RewardProbeError` for a function that requires a column which no row has.

    Args:
        every: read the rows to their end, also when nothing is missing any more.
    """
    missing: dict[str, set[str]] = {}
    known: dict[str, None] = {}
    for row in rows:
        known |= dict.fromkeys(row.columns)
        for part, _ in manager.parts_of(row):
            missing.setdefault(part.name, set(part.columns)).difference_update(row.columns)
        if not every and not any(missing.values()):
            return
    for name, columns in missing.items():
        if columns:
            raise RewardProbeError(
                f"the reward {name!r}: {unfilled(sorted(columns))}: no contract of rewards has it, and the rows have "
                f"the columns {', '.join(known) or 'of prompt and reference alone'}. Remedy: "
                f"{_OF_TRL * ('environments' in columns)}give it a default, or name a column. The contracts are "
                f"{EXPECTED}")


_OF_TRL = ("TRL's environments live in other processes here, so give their class a method get_reward(), and take "
           "--reward environment. Otherwise ")


def check_turns(manager: RewardManager, row: RewardInput, role: str) -> None:
    """Raise a :class:`UserError` if a reward model, which reads all messages of a response, refuses those of an
    environment.

    Args:
        role: of these messages.
    """
    said, heard = {"role": "assistant", "content": "?"}, {"role": role, "name": "f", "content": "?"}
    for model in manager.neural.values():
        try:
            model.view([replace(row, play=Play([said, heard, said]))])
        except DataError as error:
            raise UserError(
                f"--reward_pretrain {model.path}: the reward model reads the messages of the environment, and "
                f"its chat template refuses the role {role!r}. Give a reward model whose template has it, "
                f"or score with --reward. {error}") from error


def _with_readable_references(manager: RewardManager, rows: Iterable[RewardInput]) -> Iterator[RewardInput]:
    for row in rows:
        for part, _ in manager.parts_of(row):
            try:
                check_reference(part.name if part.built_in else "", row.reference)
            except ReferenceFormError as error:
                raise RewardProbeError(
                    f"the reward {part.name!r} cannot read the reference of {_name(row)}: {error}. Remedy: write the "
                    "answer as a text or a list of texts, name another column with --reference_key, or score such rows "
                    "with a function of your own") from None
        yield row


def good_answers(manager: RewardManager, row: RewardInput) -> list[str]:
    """Return responses that hold the reference in the form that the parts of ``row`` read, with and without a line of
    thought; for functions of users, which may read any form, also the reference alone."""
    text, parts = _known_answer(row), [part for part, _ in manager.parts_of(row)]
    tagged = any(part.name in TAGGED for part in parts)
    answer = f"<answer>{text}</answer>" if tagged else f"\\boxed{{{text}}}"
    return [f"<think></think>{answer}", answer, *([] if all(part.built_in for part in parts) else [text])]


def _known_answer(row: RewardInput) -> str:
    """Return the first accepted answer, empty without any; the whole reference where only functions of users read
    it."""
    try:
        return next(iter(reference_answers(row.reference)), "")
    except ReferenceFormError:
        return str(row.reference)


def bad_answer(row: RewardInput) -> str:
    """Return a response with another answer than the reference (and no line of thought)."""
    text = _known_answer(row)
    number = plain_number(normalise(text))
    return f"\\boxed{{{number + 1 if number is not None else 'no such answer' if text else ''}}}"


def score_answers(manager: RewardManager, row: RewardInput) -> list[Score]:
    """Score the known-good answers to ``row`` and the known-bad one, as one group."""
    answers = [*good_answers(manager, row), bad_answer(row)]
    return manager.score([replace(row, response=answer) for answer in answers])


def nothing_scored(row: RewardInput, scores: list[Score]) -> RewardProbeError:
    """Build the error for a row to which no answer could be scored."""
    return RewardProbeError(
        f"no answer to {_name(row)} could be scored: {', '.join(_errors(scores))} (details in the log above). Remedy: "
        "correct the reward, the server or the row; --no_reward_probe skips this check")


def _errors(scores: list[Score]) -> list[str]:
    return sorted({score.error for score in scores if score.error is not None})


def _probe_row(manager: RewardManager, row: RewardInput) -> list[Score]:
    scores = score_answers(manager, row)
    if all(score.total is None for score in scores):
        raise nothing_scored(row, scores)
    if errors := _errors(scores):
        warn_of_all(f"probing the reward on {_name(row)}: some answers were left unscored ({', '.join(errors)})")
    if row.reference is not None:
        _compare(manager, row, scores)
    return scores


def _compare(manager: RewardManager, row: RewardInput, scores: list[Score]) -> None:
    parts = [(part, weight) for part, weight in manager.parts_of(row) if weight]  # the others are only measured
    ours = [(part.name, weight) for part, weight in parts if part.built_in]
    sums = [sum(weight * (score.parts[name] or 0.0) for name, weight in ours) for score in scores]
    if ours and max(sums[:-1]) <= sums[-1]:
        raise RewardProbeError(
            f"the reward does not separate right from wrong on {_name(row)}: the known-good answer "
            f"{quoted(good_answers(manager, row)[0])} scores {max(sums[:-1]):g}, the known-bad "
            f"{quoted(bad_answer(row))} {sums[-1]:g}. "
            "Remedy: check the row's reference and the weights of --reward; --no_reward_probe skips this check")
    totals = [score.total for score in scores]
    known = [total for total in totals[:-1] if total is not None]
    if len(ours) < len(parts) and known and totals[-1] is not None and max(known) <= totals[-1]:
        warn_of_all(
            f"the reward scores the known-good answer {quoted(good_answers(manager, row)[0])} to {_name(row)} no "
            f"higher ({max(known):g}) than the known-bad {quoted(bad_answer(row))} ({totals[-1]:g})")


def _name(row: RewardInput) -> str:
    return (f"the row with label {quoted(row.label)}, data source {quoted(row.data_source)}, reference "
            f"{'none' if row.reference is None else quoted(row.reference)} and prompt {quoted(row.prompt[:120])}")


def quoted(value: object) -> str:
    """Quote a text for a message, on one line and with its backslashes as they are."""
    return "'" + str(value).replace("\n", "\\n") + "'"


def check_spread(manager: RewardManager, rows: Iterable[RewardInput], zero_spread: float) -> None:
    """Raise :class:`UserError` if rewards of no row can differ by more than ``zero_spread``: no group would count."""
    most = max((_widest(manager.parts_of(row)) for row in rows), default=inf)
    if most <= zero_spread:
        raise UserError(
            f"--zero_spread {zero_spread:g}: the rewards of these prompts differ by at most {most:g}, the sum of their "
            "weights, so --dynamic_sampling would reject every group and no batch would ever fill; nearest valid "
            f"value: a little below {most:g}")


def _widest(parts: Weighted) -> float:
    """Return the largest difference of two rewards: built-in parts are between 0 and 1, others have no known bound."""
    return sum(abs(weight) if part.name in FAST else inf for part, weight in parts)
