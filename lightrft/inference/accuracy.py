"""Numbers of an evaluation from its answers: pass@k, avg@k and maj@k with intervals, and paired differences of models.

An answer is correct as in the evaluation of a run (:class:`lightrft.rewards.correctness.Correctness`). Unscored answers
enter no number and are counted.
"""
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean, stdev

from lightrft.inference.row_files import Row
from lightrft.rewards.correctness import Correctness
from lightrft.rewards.rules import choice_letter, normalise, plain_number
from lightrft.trainer.evaluator import pass_at_k, wilson_interval, Z
from lightrft.utils.marked_answers import extract_answer
from lightrft.utils.play import BETWEEN, Play

SUBSETS = 2000  # most subsets of the answers to a prompt that maj@k looks at


@dataclass
class Answers:
    """Scored answers to one prompt: whether each is correct, its reward, and what it says (None: no answer).

    ``correct`` and ``said`` are empty where no part of the reward says what is correct.
    """
    source: str
    correct: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    said: list[str | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    unscored: int = 0


def group_answers(rows: Sequence[Row], rule: Correctness) -> dict[str, Answers]:
    """Group rows of batch inference by prompt, under its ``prompt_id``; ``rule`` has seen all rows to compare."""
    found: dict[str, Answers] = {}
    for row in rows:
        group = found.setdefault(row["prompt_id"], Answers(row.get("data_source") or "default"))
        group.tokens.append(row["tokens"])
        if row["reward"] is None:
            group.unscored += 1
            continue
        parts = parts_of(row)
        group.rewards.append(row["reward"])
        right = rule.is_right(parts)
        if right is not None:
            group.correct.append(right)
            group.said.append((choice_letter if "choice" in parts else final_answer)(drawn_text(row)))
    return found


def drawn_text(row: Row) -> str:
    """Return what the policy drew in a response: its output, without what an environment wrote in it."""
    play = Play.load(row.get("play"))
    return row["output"] if play is None else BETWEEN.join(play.answers)


def parts_of(row: Row) -> dict[str, float | None]:
    """Return the parts of the reward of a row; the reward alone of a row that another program has scored."""
    return row.get("reward_parts") or {"reward": row["reward"]}


def final_answer(response: str) -> str | None:
    """Return the answer of a response in a form that is the same for equal ones: a rational, or normalised text."""
    answer = extract_answer(response)
    if not answer:
        return None
    text = normalise(answer)
    number = plain_number(text)
    return text if number is None else str(number)


def maj_at_k(correct: Sequence[bool], said: Sequence[str | None], k: int) -> float:
    """Probability that the most frequent of k answers, drawn without replacement, is correct (Wang et al. 2023,
    arXiv:2203.11171).

    Of answers that are equally frequent each is chosen with the same probability; a response without an answer has no
    vote. It is the mean over all subsets of k, or over ``SUBSETS`` random ones, always the same, where there are more.
    """
    n, votes = len(correct), list(zip(said, correct, strict=True))
    if math.comb(n, k) <= SUBSETS:
        return fmean(_majority(subset) for subset in combinations(votes, k))
    draw = random.Random(f"{n} {k}")
    return fmean(_majority(draw.sample(votes, k)) for _ in range(SUBSETS))


def _majority(votes: Sequence[tuple[str | None, bool]]) -> float:
    """Return the chance that the answer with the most votes is correct."""
    counts = Counter(answer for answer, _ in votes if answer is not None)
    most = max(counts.values(), default=0)
    verdicts = [fmean(right for answer, right in votes if answer == chosen) for chosen in counts
                if counts[chosen] == most]  # yapf: disable
    return fmean(verdicts) if verdicts else 0.0


Measure = Callable[[Answers], float | None]  # a number of a prompt; None: it has too few scored answers


def measures(n: int, pass_k: Sequence[int], maj_k: Sequence[int]) -> dict[str, Measure]:
    """Return what is measured of a prompt, by name: ``pass@k``, ``avg@n`` (share of correct answers), ``maj@k``,
    ``reward``."""

    def enough(k: int, number: Callable[[Answers], float]) -> Measure:
        return lambda one: number(one) if len(one.correct) >= k else None

    found = {f"pass@{k}": enough(k, lambda one, k=k: pass_at_k(len(one.correct), sum(one.correct), k))  # type: ignore
             for k in pass_k}  # yapf: disable
    found[f"avg@{n}"] = enough(1, lambda one: fmean(one.correct))
    for k in maj_k:
        found[f"maj@{k}"] = enough(k, lambda one, k=k: maj_at_k(one.correct, one.said, k))  # type: ignore[misc]
    return found | {"reward": lambda one: fmean(one.rewards) if one.rewards else None}


def sources(answers: Mapping[str, Answers]) -> dict[str, list[str]]:
    """Return the prompts of each data source, and of ``all`` if there are several."""
    found = defaultdict(list)
    for uid, group in answers.items():
        found[group.source].append(uid)
    return ({"all": list(answers)} if len(found) > 1 else {}) | dict(sorted(found.items()))


def results(answers: Mapping[str, Answers], wanted: Mapping[str, Measure]) -> list[Row]:
    """Return one row per source and measure: ``value`` with a 95 % interval ``low``, ``high`` over ``prompts``.

    Intervals of shares are Wilson's; that of the mean reward is the normal one, and needs values that differ.
    """
    rows = []
    for source, uids in sources(answers).items():
        for name, measure in wanted.items():
            values = [value for uid in uids if (value := measure(answers[uid])) is not None]
            if not values:
                continue
            mean = fmean(values)
            low, high = normal_interval(values) if name == "reward" else wilson_interval(mean, len(values))
            rows.append({"source": source, "metric": name, "value": mean, "low": low, "high": high,
                         "prompts": len(values)})  # yapf: disable
        of = [answers[uid] for uid in uids]
        rows.append({"source": source, "metric": "tokens", "value": fmean(n for one in of for n in one.tokens)})
        rows.append({"source": source, "metric": "unscored", "value": sum(one.unscored for one in of)})
    return rows


def normal_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 95 % interval of a mean from its standard error; None where all values are the same, from which
    nothing is known of their spread."""
    if len(set(values)) < 2:
        return None, None
    half = Z * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def differences(first: Mapping[str, Answers], other: Mapping[str, Answers], wanted: Mapping[str, Measure]) -> list[Row]:
    """Compare two models prompt by prompt: one row per source and measure.

    ``difference`` is the mean of ``other - first`` over the prompts that both have, with the normal 95 % interval of
    paired values; ``better`` and ``worse`` count the prompts where it is above and below 0, and ``p`` is the
    probability of so uneven counts if both were equally likely (two-sided sign test).
    """
    rows = []
    for source, uids in sources(first).items():
        for name, measure in wanted.items():
            pairs = [(measure(first[uid]), measure(other[uid])) for uid in uids if uid in other]
            gaps = [theirs - mine for mine, theirs in pairs if mine is not None and theirs is not None]
            if not gaps:
                continue
            low, high = normal_interval(gaps)
            better, worse = sum(gap > 1e-9 for gap in gaps), sum(gap < -1e-9 for gap in gaps)
            rows.append({
                "source": source, "metric": name, "difference": fmean(gaps), "low": low, "high": high, "prompts":
                len(gaps), "better": better, "worse": worse, "p": sign_test(better, worse)
            })
    return rows


def sign_test(better: int, worse: int) -> float:
    """Return the probability that a fair coin, tossed ``better + worse`` times, falls at least so unevenly."""
    n = better + worse
    tail = sum(math.comb(n, k) for k in range(min(better, worse) + 1))
    return min(1.0, 2 * tail / 2**n)
