r"""Built-in reward parts ``exact``, ``choice``, ``format``, ``math``, ``answer`` and ``tags``; the final answer.

All parts judge only the response, never the prompt. Each part has a *fast*
function that runs in the trainer process in microseconds. It returns an ``Outcome``, or None when it cannot decide;
then (``math`` only) a worker process that can be killed runs math-verify. Plain answers are compared exactly: text and
rationals, no algebra.
"""
import logging
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

from lightrft.rewards.base import LARGEST, Outcome, Reward, RewardInput, REWARDS
from lightrft.rewards.reasoning_gym import reasoning_gym
from lightrft.rewards.references import accepted_answers, FIELDS, REFERENCE_FORM, ReferenceFormError, written_value
from lightrft.utils.marked_answers import boxed_answers, extract_answer

NO_REFERENCE = Outcome(
    None, "no_reference",
    "the row has no reference answer, which this reward compares with. Name its column with --reference_key")


def exact_score(item: RewardInput) -> Outcome:
    r"""Score 1 if the last ``\boxed{..}`` is the reference, or one of several, character by character (stripped), else
    0."""
    accepted = accepted_answers(item.reference)
    if not accepted:
        return NO_REFERENCE
    boxes = boxed_answers(item.response)
    return Outcome(float(bool(boxes) and boxes[-1] in accepted))


def choice_score(item: RewardInput) -> Outcome:
    """Score 1 if the letter of the final answer (:func:`choice_letter`) is the reference, else 0."""
    accepted = accepted_answers(item.reference)
    if not accepted:
        return NO_REFERENCE
    letter = choice_letter(item.response)
    return Outcome(float(letter is not None and letter in map(str.upper, accepted)))


def choice_letter(response: str) -> str | None:
    r"""Return the letter of the final answer, as a capital.

    The final answer is that of :func:`extract_answer`, such as ``\boxed{C}`` or ``\boxed{(C) a quark}``; without one it
    is the last "answer is C" or "Answer: C" of the response.
    """
    answer = extract_answer(response)
    letters = _CHOICE.findall(normalise(answer) if answer is not None else "") or _ANSWER_IS.findall(response)
    return letters[-1].upper() if letters else None


def format_score(item: RewardInput) -> Outcome:
    r"""Score 1 if one ``<think>..</think>`` is followed by exactly one ``\boxed{..}``, else 0.

    A chat template that already ends the prompt with ``<think>`` counts as the opening tag.
    """
    text = ("<think>" if item.prompt.rstrip().endswith("<think>") else "") + item.response
    before, close, after = text.partition("</think>")
    once = text.count("<think>") == 1 and text.count("</think>") == 1 and "<think>" in before
    return Outcome(float(bool(close) and once and len(boxed_answers(after)) == 1))


def math_score(item: RewardInput) -> Outcome | None:
    """Score 1 or 0 if text or exact rationals decide (no answer at all is 0); return None if algebra must decide."""
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
    """Grade with math-verify. Hostile input may block it (its own signals are off): run it in a killable process."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    how = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    answer = parse(rf"\boxed{{{extract_answer(item.response)}}}", how, parsing_timeout=None)
    for reference in reference_answers(item.reference):
        gold = parse(rf"\boxed{{{reference}}}", how, parsing_timeout=None)
        if verify(gold, answer, float_rounding=6, timeout_seconds=None):
            return Outcome(1.0)
    return Outcome(0.0)


def answer_score(item: RewardInput) -> Outcome:
    """Score 1 if the text in the last ``<answer>..</answer>`` is the reference, or one of several, letter case, blanks
    and a full stop at the end aside, else 0 (R1-AQA, arXiv:2503.11197)."""
    accepted = accepted_answers(item.reference)
    if not accepted:
        return NO_REFERENCE
    answers = _IN_TAGS.findall(item.response)
    return Outcome(float(bool(answers) and _loose(answers[-1]) in map(_loose, accepted)))


def _loose(text: str) -> str:
    return " ".join(text.split()).rstrip(".").lower()


def tags_score(item: RewardInput) -> Outcome:
    """Score 1 if the response is one ``<answer>..</answer>``, after one ``<think>..</think>`` where ``extra_info`` of
    the row has ``think``, else 0."""
    form = _REASONED if (item.columns.get("extra_info") or {}).get("think") else _ONLY_ANSWER
    return Outcome(float(bool(form.fullmatch(item.response))))


def environment_score(item: RewardInput) -> Outcome:
    """Give the sum of the rewards that the environment gave to the turns."""
    if item.play is None:
        return Outcome(
            None, "no_environment",
            "the response was not played in an environment: name one with --environment (a trial of the "
            "rewards plays none)")
    if item.play.reward is None:
        return Outcome(None, "no_reward", "the environment gave no reward in the response")
    if not (size := sum(abs(reward) for _, reward in item.play.rewards)) <= LARGEST:
        return Outcome(None, "not_finite",
                       f"the rewards of the turns are {size} in size, and at most {LARGEST:g} is taken")
    return Outcome(item.play.reward)


TAGGED = {"answer", "tags"}  # parts that read the answer in tags
_IN_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ONLY_ANSWER = re.compile(r"\s*<answer>[^<]*</answer>\s*")
_REASONED = re.compile(r"\s*<think>[^<]*</think>\s*<answer>[^<]*</answer>\s*")
Fast = Callable[[RewardInput], Outcome | None]


def _comparing(score: Fast) -> Fast:
    """Return ``score``, which compares with the reference, for which a form that it cannot read is unscored."""

    def scored(item: RewardInput) -> Outcome | None:
        try:
            return score(item)
        except ReferenceFormError as error:
            return Outcome(None, REFERENCE_FORM, f"the reference {str(item.reference)[:80]}: {error}")

    return scored


COMPARING = {"exact", "choice", "math", "answer"}  # parts that compare with the reference
FAST: dict[str, Fast] = {
    name: _comparing(score) if name in COMPARING else score for name, score in {
        "exact": exact_score, "choice": choice_score, "format": format_score, "math": math_score, "answer":
        answer_score, "tags": tags_score
    }.items()
}  # yapf: disable
"""Parts that the manager tries in its own process first."""
BARE = {"environment", *FAST} - COMPARING  # parts that read no reference


def check_reference(part: str, reference: Any) -> None:
    """Raise a :class:`ReferenceFormError` for a reference that no answer can match in the built-in reward ``part``."""
    if part not in COMPARING or reference is None:
        return
    if not accepted_answers(reference):
        raise ReferenceFormError("it holds no answer")
    value = written_value(reference.strip()) if isinstance(reference, str) and part in ("math", "choice") else None
    if isinstance(value, dict) and len(accepted_answers(reference)) == 1:
        raise ReferenceFormError(f"it is a text of an object, and has none of {', '.join(FIELDS)}")


def _each(score: Fast) -> Reward:
    """Return the reward of a batch; what ``score`` does not decide is the verdict of math-verify (in this process,
    without a deadline)."""
    return lambda batch: [(score(item) or verify_math(item)).value for item in batch]


for _name, _score in FAST.items():
    REWARDS.register(_name)(_each(_score))

# has the signature of a function in a reward file, so it runs in a worker
REWARDS.register("reasoning_gym")(cast(Reward, reasoning_gym))
REWARDS.register("environment")(lambda batch: [environment_score(item).value for item in batch])

_CHOICE = re.compile(r"^\W*([A-Za-z])(?![A-Za-z])")  # the letter that a final answer begins with
_ANSWER_IS = re.compile(r"\banswer(?: is)?:?[\s*(]*([A-Z])(?![A-Za-z])", re.IGNORECASE)
_DIGITS = r"\d{1,3}(?:[, ]\d{3})+|\d+"
_NUMBER = re.compile(rf"([+-]?) ?((?:{_DIGITS})?(?:\.\d*)?)")
_BRACED_FRACTION = re.compile(r"([+-]?)\\frac\{(\d+)\}\{(\d+)\}")
_UNIT = re.compile(
    r"(?<=\d) *(?:\\(?:text|mathrm|textbf|mbox) *\{ *[A-Za-z][^{}]*\}|(?<= )[A-Za-z]{2,}(?: [A-Za-z]+)*)\.?$")
_WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox) *\{([^{}]*)\}")
_NOISE = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:]|\\\(|\\\)|\\\[|\\\]|\\?\$|~")
_MAX_ANSWER = 256  # characters; the worker judges longer answers, too
_MAX_NUMBER = 64  # characters; the worker judges longer "numbers"


def reference_answers(reference: Any) -> list[str]:
    """Return the answers of :func:`accepted_answers` without ``\\boxed`` and ``####``."""
    marked = [(extract_answer(text), text) for text in accepted_answers(reference)]
    return [answer for answer in dict.fromkeys(text if inner is None else inner for inner, text in marked) if answer]


def normalise(answer: str) -> str:
    """Normalise spelling: no dollars, sizing, thin spaces, text wrappers or final dot; ``\\frac`` only."""
    text = _NOISE.sub("", answer.replace("−", "-"))
    text = _WORDS.sub(r" \1 ", text) if not re.search(r"\d", text) else text
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\s+", " ", text).strip()
    text = text[:-1].rstrip() if text.endswith(".") else text
    return text.casefold() if text.isalpha() and len(text) > 1 else text


def plain_number(text: str) -> Fraction | None:
    """Parse ``text`` (normalised) as an exact rational: a plain integer, decimal or fraction of integers; else None."""
    text = text.strip()
    if not text or len(text) > _MAX_NUMBER:
        return None
    match = _NUMBER.fullmatch(text)
    if match and any(c.isdigit() for c in match[2]):
        value = Fraction(re.sub(r"[, ]", "", match[2]).rstrip("."))
        return -value if match[1] == "-" else value
    match = _BRACED_FRACTION.fullmatch(text) or re.fullmatch(r"([+-]?)(\d+) ?/ ?(\d+)", text)
    if match and int(match[3]):
        value = Fraction(int(match[2]), int(match[3]))
        return -value if match[1] == "-" else value
    return None


def exact_verdict(answer: str, reference: str) -> bool | None:
    """Compare ``answer`` with ``reference`` by text or exact rationals; None means that algebra must decide.

    Numbers closer than 1e-6 but not equal (0.333333 for 1/3) are left to the algebra, and so is every other notation.
    """
    mine, theirs = normalise(answer), normalise(reference)
    if mine == theirs:
        return True
    target = plain_number(theirs)
    if target is None or len(mine) > _MAX_ANSWER:
        letters = len(mine) == len(theirs) == 1 and mine.isalpha() and theirs.isalpha()
        return mine.casefold() == theirs.casefold() if letters else None
    value = plain_number(_UNIT.sub("", mine))
    if value is None:
        return None
    return True if value == target else (None if abs(value - target) < Fraction(1, 10**6) else False)
