r"""Built-in reward parts: ``exact``, ``format`` and ``math``. All judge the response only, never the prompt.

Each part has a *fast* function that runs in the trainer process in microseconds. It returns an ``Outcome``, or None
when it cannot decide; then (``math`` only) a worker process that can be killed asks math-verify.
"""
import logging
from collections.abc import Callable

from lightrft.rewards.answers import boxed_answers, exact_verdict, extract_answer, reference_answers
from lightrft.rewards.base import REWARDS, Outcome, RewardInput

NO_REFERENCE = Outcome(None, "no_reference", "the row has no reference answer, which this reward compares with")


def exact_score(item: RewardInput) -> Outcome:
    r"""1 when the last ``\boxed{..}`` is the reference, character by character (outer blanks aside), else 0."""
    if item.reference is None:
        return NO_REFERENCE
    boxes = boxed_answers(item.response)
    return Outcome(float(bool(boxes) and boxes[-1] == str(item.reference).strip()))


def format_score(item: RewardInput) -> Outcome:
    r"""1 when one ``<think>..</think>`` is followed by exactly one ``\boxed{..}``, else 0.

    A chat template that already ends the prompt with ``<think>`` counts as the opening tag.
    """
    text = ("<think>" if item.prompt.rstrip().endswith("<think>") else "") + item.response
    before, close, after = text.partition("</think>")
    once = text.count("<think>") == 1 and text.count("</think>") == 1 and "<think>" in before
    return Outcome(float(bool(close) and once and len(boxed_answers(after)) == 1))


def math_score(item: RewardInput) -> Outcome | None:
    """1 or 0 where text or exact rationals decide (no answer at all is 0); None when algebra has to."""
    references = reference_answers(item.reference)
    if not references:
        return NO_REFERENCE
    answer = extract_answer(item.response)
    if not answer:
        return Outcome(0.0)
    verdicts = [exact_verdict(answer, reference) for reference in references]
    if True in verdicts:
        return Outcome(1.0)
    return None if None in verdicts else Outcome(0.0)


def verify_math(item: RewardInput) -> Outcome:
    """Grade with math-verify. May hang on hostile input: for processes that can be killed (its own signals are off)."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    how = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    answer = parse(rf"\boxed{{{extract_answer(item.response)}}}", how, parsing_timeout=None)
    for reference in reference_answers(item.reference):
        gold = parse(rf"\boxed{{{reference}}}", how, parsing_timeout=None)
        if verify(gold, answer, float_rounding=6, timeout_seconds=None):
            return Outcome(1.0)
    return Outcome(0.0)


FAST: dict[str, Callable[[RewardInput],
                         Outcome | None]] = {"exact": exact_score, "format": format_score, "math": math_score}
"""Parts that the manager tries in its own process first."""


@REWARDS.register("exact")
def exact(batch: list[RewardInput]) -> list[float | None]:
    """``exact_score`` of each response."""
    return [exact_score(item).value for item in batch]


@REWARDS.register("format")
def format_(batch: list[RewardInput]) -> list[float | None]:
    """``format_score`` of each response."""
    return [format_score(item).value for item in batch]


@REWARDS.register("math")
def math(batch: list[RewardInput]) -> list[float | None]:
    """``math_score``, and math-verify where that cannot decide (in this process, without a deadline)."""
    return [(math_score(item) or verify_math(item)).value for item in batch]
