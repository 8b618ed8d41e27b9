"""Public evaluation sets by name (``--eval_suite``): published rows, the question to ask, the correct answer."""
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lightrft.config.options import ConfigError
from lightrft.config.reward_schema import SUITE_LABEL
from lightrft.datasets.prompt_rows import missing
from lightrft.datasets.rows import DataError, load_rows, read_hub, Row, Rows
from lightrft.datasets.sources import final_answer
from lightrft.utils.errors import did_you_mean
from lightrft.utils.prompt import Prompt

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
CHOICE = "Please reason step by step, and put the letter of the right choice within \\boxed{}."
LETTERS = "ABCD"


@dataclass(frozen=True)
class Suite:
    """One evaluation set.

    Attributes:
        hub: its id on the Hugging Face hub.
        split: the split that is evaluated.
        read: converts a row to the question and its reference answer; a missing column is a ``KeyError``.
        config: the configuration (subset) on the hub.
        instruction: follows the question; ``--input_template`` replaces it.
    """
    hub: str
    split: str
    read: Callable[[Row], tuple[str, str]]
    config: str = ""
    instruction: str = BOXED


def _problem(row: Row) -> tuple[str, str]:
    """Read MATH-500 (Hendrycks et al. 2021, arXiv:2103.03874; Lightman et al. 2023, arXiv:2305.20050) and AIME.

    ``HuggingFaceH4/MATH-500``: problem, solution, answer (LaTeX), subject, level, unique_id.
    ``HuggingFaceH4/aime_2024``: id, problem, solution, answer (text, perhaps with leading zeros), url, year.
    ``MathArena/aime_2025``: problem_idx, problem, answer (an integer), problem_type. Other copies write ``Problem`` and
    ``Answer``, or ``question``.
    """
    columns = {name.lower(): value for name, value in row.items()}
    question = columns["question"] if missing(columns.get("problem")) else columns["problem"]
    return question.strip(), str(columns["answer"]).strip()


def _gsm8k(row: Row) -> tuple[str, str]:
    """Read GSM8K (Cobbe et al. 2021, arXiv:2110.14168), ``openai/gsm8k``: question, answer that ends ``#### 42``."""
    return row["question"].strip(), final_answer(row["answer"])


def _gpqa(row: Row) -> tuple[str, str]:
    """Read GPQA (Rein et al. 2023, arXiv:2311.12022), ``Idavidrein/gpqa``: Question, Correct Answer, Incorrect Answer 1
    to 3, among other columns.

    The choices are shuffled by a seed that depends on the question alone, so every run asks the same.
    """
    columns = ["Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3))]
    choices = [str(row[column]).strip() for column in columns]
    order = random.Random(f"gpqa {row['Question']}").sample(range(4), 4)
    lines = [f"{letter}) {choices[i]}" for letter, i in zip(LETTERS, order)]
    return "\n".join([row["Question"].strip(), "", *lines]), LETTERS[order.index(0)]


SUITES: dict[str, Suite] = {
    "math500": Suite("HuggingFaceH4/MATH-500", "test", _problem),
    "aime24": Suite("HuggingFaceH4/aime_2024", "train", _problem),
    "aime25": Suite("MathArena/aime_2025", "train", _problem),
    "gpqa": Suite("Idavidrein/gpqa", "train", _gpqa, "gpqa_diamond", CHOICE),
    "gsm8k": Suite("openai/gsm8k", "test", _gsm8k, "main"),
}
"""Name -> suite. Plugins may add entries, with a reward recipe under ``suite/<name>``."""


def parse_suite(entry: str) -> tuple[str, str]:
    """Split an ``--eval_suite`` entry ``name`` or ``name=path`` into name and path (empty: from the hub).

    Raises:
        ConfigError: no such suite.
    """
    name, _, path = entry.partition("=")
    if name not in SUITES:
        raise ConfigError(f"--eval_suite {entry}: unknown suite {name!r}{did_you_mean(name, SUITES)}; known: "
                          f"{', '.join(SUITES)}")
    return name, path


def load_suite(entry: str, chat: bool, instructed: bool) -> tuple[Rows, list[Prompt]]:
    """Read the rows of an ``--eval_suite`` entry, whole, with their prompts.

    Args:
        chat: make each prompt one user turn, for a tokenizer with a chat template; else it is text.
        instructed: append the suite's instruction to the question.

    Raises:
        DataError: the rows cannot be read, or are not those of this suite.
    """
    name, path = parse_suite(entry)
    suite = SUITES[name]
    rows = _read(name, suite, path)
    return rows, [_prompt(name, suite, row, where, chat, instructed) for row, where in rows.named]


def _read(name: str, suite: Suite, path: str) -> Rows:
    """Read a local copy, or the hub. A folder may be a clone of the data set's repository on the hub."""
    if not path:
        try:
            return read_hub(suite.hub, suite.split, suite.config)
        except DataError as error:
            raise DataError(
                f"--eval_suite {name}: {error}. Where there is a network: hf download --repo-type dataset {suite.hub} "
                f"--local-dir {name} (a gated data set also asks you to accept its terms and for HF_TOKEN); then "
                f"--eval_suite {name}={name}") from error
    folder = Path(path).expanduser()
    if suite.config and (folder / suite.config).is_dir():
        return load_rows(str(folder / suite.config), suite.split)
    by_config = bool(suite.config) and any(folder.glob(f"{suite.config}.*"))
    return load_rows(path, suite.config if by_config else suite.split)


def _prompt(name: str, suite: Suite, row: Row, where: str, chat: bool, instructed: bool) -> Prompt:
    try:
        question, answer = suite.read(row)
    except (KeyError, AttributeError) as error:
        raise DataError(f"--eval_suite {name}: {where}: not a row of {suite.hub} ({error}); it has "
                        f"{', '.join(row)}") from error
    text = f"{question}\n\n{suite.instruction}" if instructed else question
    prompt = Prompt("", [], text, data_source=name, label=SUITE_LABEL + name, reference=answer, columns=row)
    return replace(prompt, text="", messages=prompt.chat) if chat else prompt
