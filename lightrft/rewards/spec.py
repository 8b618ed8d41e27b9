"""Reward parts of a run: from ``--reward`` entries and ``--remote_rm_url``, else from a row's label or data source."""
import math
import pickle
import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle

from lightrft.rewards.base import JudgedRow, Outcome, RewardInput, REWARDS
from lightrft.rewards.timeouts import GroupBudget
from lightrft.rewards.workers.pool import WorkerPool
from lightrft.rewards.remote import RemoteReward
from lightrft.rewards.rules import BARE, environment_score, FAST
from lightrft.rewards.workers.user_file import check_source, signature_of
from lightrft.rewards.workers.worker import Spec
from lightrft.utils.errors import first_line, UserError

NO_MATH_VERIFY = ("the reward math: the package math_verify is not installed; run: pip install -e . in the checkout of "
                  "lightrft, or take --reward exact")
Submit = Callable[[list[RewardInput], list[GroupBudget]], list[Future[list[Outcome]]]]


@dataclass(frozen=True)
class RewardEntry:
    """One parsed ``--reward`` entry: a registered ``name``, or a file and optionally its function."""
    name: str
    weight: float = 1.0
    path: str = ""
    function: str = ""


@dataclass(frozen=True)
class RewardPart:
    """One reward part: ``fast`` decides in this process or returns None; then ``submit`` (worker or server) decides.

    ``together``: the part may compare the responses to a prompt and needs all of them; else ``submit`` gives a future
    for each response. ``columns`` of the rows are required; ``reads_models``: it starts when the reward models have
    scored.
    """
    name: str
    fast: Callable[[RewardInput], Outcome | None] | None = None
    submit: Submit | None = None
    together: bool = False
    warm: Callable[[], object] | None = None
    limit_s: float = 0.0  # seconds for one response; 0: --reward_timeout_s
    columns: tuple[str, ...] = ()
    reads_models: bool = False

    @property
    def built_in(self) -> bool:
        """True for a built-in part, whose score of a known-good answer must beat that of a known-bad one."""
        return self.fast is not None


def parse_entry(text: str) -> RewardEntry:
    """Parse ``name``, ``name=weight`` or ``path.py[:function][=weight]``; ``ValueError`` for anything else."""
    match = re.fullmatch(r"(?P<what>.+?)(?:=(?P<weight>[^=]*))?", text.strip())
    if match is None:
        raise UserError("empty --reward entry. Remedy: 'name', 'name=weight' or 'path.py:function=weight'")
    try:
        weight = float(match["weight"]) if match["weight"] is not None else 1.0
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(
            f"--reward {text!r}: the weight {match['weight']!r} is no number. Remedy: for example {match['what']}=0.5")
    alone = re.fullmatch(r"(?:(?P<name>[A-Za-z]\w*):)?[\d.]+", match["what"])
    if alone:
        example = f"{alone['name'] or 'exact'}=0.5"
        raise UserError(f"--reward {text!r}: a weight stands behind its part and =. Remedy: for example {example}")
    file = re.fullmatch(r"(?P<path>.+\.py)(?::(?P<function>\w+))?", match["what"])
    if file:
        return RewardEntry(
            Path(file["path"]).stem, weight, str(Path(file["path"]).expanduser().resolve()), file["function"] or "")
    return RewardEntry(match["what"], weight)


def may_compare(entries: list[str]) -> bool:
    """Return whether a part of ``--reward`` may read reference answers; without parts the recipe of a row decides."""
    return not entries or any(entry.path or entry.name not in BARE for entry in map(parse_entry, entries))


def named_part(name: str, pool: WorkerPool) -> RewardPart:
    """Return a registered reward. Built-in ones try to decide in this process; others run in the workers.

    It takes a list of :class:`~lightrft.rewards.base.RewardInput`, or has one of the signatures of a reward file.
    Raises :class:`UserError` where the package of ``math`` is not installed.
    """
    reward = REWARDS.get(name)
    if name == "math":
        if find_spec("math_verify") is None:
            raise UserError(NO_MATH_VERIFY)
        spec = Spec("math")
        return RewardPart(name, FAST[name], partial(pool.submit, spec), warm=lambda: pool.load(spec))
    if name in FAST or name == "environment":
        return RewardPart(name, FAST.get(name, environment_score))
    kind = "callable" if signature_of(reward) is None else "function"
    return _in_worker(Spec(kind, function=name, pickled=_pickled(name, reward)), pool)


def _pickled(name: str, reward: object) -> bytes:
    """Pickle a reward, by value if it is defined in the program that runs, such as a notebook."""
    try:
        return cloudpickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(f"reward {name!r} cannot be sent to a worker process: {first_line(error)}. Remedy: open files, "
                        "models and locks inside of the function") from error


def _in_worker(spec: Spec, pool: WorkerPool) -> RewardPart:
    info = pool.load(spec).result()
    return RewardPart(info.name, submit=partial(pool.submit_together if info.batched else pool.submit, spec),
                      together=info.batched, columns=info.columns, reads_models=info.reads_models)


def file_part(entry: RewardEntry, pool: WorkerPool) -> RewardPart:
    """Check a user's file and load it in a worker now. Raises ``ValueError`` with file, line and remedy if unfit."""
    check_source(Path(entry.path))
    return _in_worker(Spec("file", entry.path, entry.function), pool)


def function_part(name: str, function: Callable[..., Any], pool: WorkerPool) -> RewardPart:
    """Send a function of this program to the workers; it has one of the signatures of a reward file."""
    return _in_worker(Spec("function", function=name, pickled=_pickled(name, function)), pool)


def remote_part(remote: RemoteReward, name: str) -> RewardPart:
    """Return reward servers, or the servers of a judge, as a part."""
    return RewardPart(name, submit=remote.submit, limit_s=remote.limit_s)


def parse_models(entries: list[str]) -> dict[str, str]:
    """Map the names of reward models to their paths; :func:`named_models` has every entry."""
    return dict(named_models(entries))


def named_models(entries: list[str]) -> list[tuple[str, str]]:
    """Return name and path of every reward model: ``name=path``, else "rm", or "rm1", "rm2" ... of several."""
    names = [f"rm{i}" for i in range(1, len(entries) + 1)] if len(entries) > 1 else ["rm"]
    named = [entry.partition("=") for entry in entries]
    return [(name if equals else default, path if equals else name)
            for default, (name, equals, path) in zip(names, named)]  # yapf: disable


RewardRecipe = list[tuple[str, float]]


def add_recipe(text: str, recipes: dict[str, RewardRecipe]) -> None:
    """Add ``SOURCE:part=weight+part=weight`` to ``recipes``.

    Raises:
        UserError: the text has another form, names a part twice, or its source has a recipe already.
    """
    source, colon, parts = text.partition(":")
    entries = [parse_entry(part) for part in parts.split("+")] if colon and source and parts else []
    if not entries or any(entry.path for entry in entries):
        raise UserError(f"--reward_recipe {text!r}: write SOURCE:part=weight+part=weight, e.g. gsm8k:math=0.9+rm=0.1, "
                        "with names of rewards")
    names = [entry.name for entry in entries]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(
            f"--reward_recipe {text!r} names {twice!r} twice. Remedy: name it once, with the weight you want")
    if source in recipes:
        raise UserError(f"--reward_recipe {text!r}: {source!r} has a recipe already. Remedy: write its parts in one")
    recipes[source] = [(entry.name, entry.weight) for entry in entries]


_MATH_WITH_FORMAT: RewardRecipe = [("math", 0.9), ("format", 0.1)]
_EXACT: RewardRecipe = [("exact", 1.0)]
_MATH: RewardRecipe = [("math", 1.0)]
_TAGGED: RewardRecipe = [("answer", 1.0), ("tags", 1.0)]

RECIPES: dict[str, RewardRecipe] = {
    "gsm8k_rule": _MATH_WITH_FORMAT,
    "openai/gsm8k": _MATH_WITH_FORMAT,
    "geo3k_rule": _MATH_WITH_FORMAT,
    "hiyouga/geometry3k": _MATH_WITH_FORMAT,
    "avqa_rule": _TAGGED,
    "r1-aqa-avqa": _TAGGED,
    "quickstart_rule": _EXACT,
    "lightrft/quickstart": _EXACT,
    "exact_rule": _EXACT,
    "format_rule": [("format", 1.0)],
    "math_rule": _MATH,
    "accuracy_rule": _MATH,
    "HuggingFaceH4/MATH-500": _MATH,
    "DigitalLearningGmbH/MATH-lighteval": _MATH,
    "suite/math500": _MATH,
    "suite/aime24": _MATH,
    "suite/aime25": _MATH,
    "suite/gpqa": [("choice", 1.0)],
    "suite/gsm8k": _MATH,
    "reasoning_gym_rule": [("reasoning_gym", 1.0)],
}
"""Label or data source -> [(reward part, weight)]. Plugins may add entries."""


def recipe_for(item: JudgedRow) -> RewardRecipe:
    """Return the recipe of a row; ``ValueError`` with the known ones if neither label nor data source has one."""
    for key in (item.label, item.data_source):
        if key in RECIPES:
            return RECIPES[key]
    known = f" Known recipes: {', '.join(sorted(RECIPES))}." if item.label or item.data_source else ""
    raise UserError(
        f"no reward recipe for label {item.label!r} or data source {item.data_source!r}.{known} Remedy: "
        "name the reward, for example --reward math or --reward my_reward.py, or name the column of the label with "
        f"--label_key (the row has {', '.join(item.columns) or 'no other columns'})")
