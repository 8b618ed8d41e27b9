"""A user's reward file with one of five signatures, recognised by parameter names. Runs in worker processes.

- ``reward_func(queries, prompts, labels)``: lists in; a list, a tensor or ``{"rewards": ...}`` out.
  A query is prompt + response; a label is the row's reference, or its label where it has none.
- ``reward_fn(model_reward_list, labels, queries, refs, label_map)``: lists in, ``(rewards, metrics)`` out. The first
  list has a tensor [B] of scores per reward model, the map its index by name; a label is the row's label.
- ``compute_score(data_source, solution_str, ground_truth, extra_info=None)``: one response; a number out,
  or ``{"score": ...}``, whose other numbers become metrics.
- ``compute_score(data_sources, solution_strs, ground_truths, extra_infos=None)``: the same for lists.
- ``f(prompts, completions, **columns)``: lists in, a list out; None leaves a response unscored.

Each may have a parameter ``turns``: the messages of a response (lists: of each), with their roles, where an environment
answers. Each may be ``async``, an object with ``__call__`` or a ``functools.partial``. A parameter without a default
has to be one of these or, in a function of lists, a column of the rows. A function of lists always gets whole groups,
the responses to a prompt.
"""
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from lightrft.rewards.base import is_response_fault, LARGEST, Outcome, RewardInput
from lightrft.rewards.workers.event_loop import event_loop, LOOP_FILES, wait_for
from lightrft.utils.errors import CaptureException, UserError

SIGNATURES = {
    "model_rewards": ("model_reward_list", "queries"),
    "reward_func": ("queries", ), "compute_score": ("solution_str", "ground_truth"),
    "compute_scores": ("solution_strs", "ground_truths"), "completions": ("completions", )
}  # yapf: disable
"""Signature -> the parameter names that identify it."""
EXPECTED = (
    "reward_func(queries, prompts, labels), reward_fn(model_reward_list, labels, queries, refs, label_map), "
    "compute_score(data_source, solution_str, ground_truth, extra_info=None), the same for lists (data_sources, "
    "solution_strs, ground_truths, extra_infos) or f(prompts, completions, **columns)")
REMEDY = (
    "The function takes lists, so this leaves all {count} responses of the group unscored. Remedy: let it return None "
    "(unscored), a number or ResponseFault(...) (0) for the response that it cannot judge")
Scorer = Callable[[list[RewardInput]], Iterator[Outcome | None]]
"""Yields one Outcome per response in order; a None restarts the deadline."""


def check_source(path: Path) -> None:
    """Raise ``ValueError`` with file and line if ``path`` is missing, not text or not Python."""
    try:
        compile(path.read_bytes(), str(path), "exec")
    except FileNotFoundError as error:
        raise UserError(
            f"reward file {path} does not exist. Remedy: give --reward the path of a Python file") from error
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(f"reward file {path}{line}: {error}. Remedy: correct the file") from error
    except OSError as error:
        raise UserError(f"reward file {path} cannot be read: {error}") from error


class Loaded(NamedTuple):
    """A function as a scorer.

    Args:
        batched: it takes a whole batch.
        columns: parameters that only columns of the rows can fill.
        reads_models: it takes the scores of the reward models.
    """
    scorer: Scorer
    name: str
    batched: bool
    columns: tuple[str, ...] = ()
    reads_models: bool = False


def load(path: str, function: str = "") -> Loaded:
    """Import the file and wrap its function."""
    name, chosen = _choose(_import(Path(path)), path, function)
    code = getattr(inspect.unwrap(chosen), "__code__", None)
    where = f"reward file {path}{f', line {code.co_firstlineno}' if code else ''}: {name}"
    return scorer_of(chosen, where, name)


def scorer_of(function: Callable[..., Any], where: str, name: str = "") -> Loaded:
    """Wrap a function of one of the signatures.

    Raises:
        UserError: it has none, or a parameter without a default that nothing can fill.
    """
    kind, parameters = signature_of(function), _parameters(function)
    shown = f"{where}({', '.join(map(str, parameters.values()))})"
    if kind is None:
        raise UserError(f"{shown} has none of the known signatures. Remedy: {EXPECTED}")
    required = [name for name in _named(parameters) if parameters[name].default is inspect.Parameter.empty]
    columns = tuple(name for name in required if name not in _ARGUMENTS[kind]([]))
    if columns and kind in ("compute_score", "compute_scores"):
        raise UserError(f"{shown}: {unfilled(columns)}; columns of a row are in extra_info. Remedy: give a default to "
                        f"what is not one of {EXPECTED}")
    call = _caller(function, parameters)
    if kind == "compute_score":
        return Loaded(_each(call), name, False)
    return Loaded(scorer_of_batches(lambda batch: call(_ARGUMENTS[kind](batch) | _empty(columns, batch))), name, True,
                  columns, kind == "model_rewards")  # yapf: disable


def unfilled(names: Iterable[str]) -> str:
    """Say that nothing fills the parameters ``names``."""
    return f"nothing can fill the parameter {', '.join(names)}"


def _empty(columns: tuple[str, ...], batch: list[RewardInput]) -> dict[str, Any]:
    """Return the required columns that other rows have, and these have not: None."""
    return {name: [None] * len(batch) for name in columns if not any(name in item.columns for item in batch)}


def signature_of(function: Callable[..., Any]) -> str | None:
    """Return the key of ``SIGNATURES`` that fits the parameter names of ``function``, or None."""
    names = set(_named(_parameters(function)))
    return next((kind for kind, required in SIGNATURES.items() if names.issuperset(required)), None)


def _named(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names of all parameters but ``*args`` and ``**kwargs``."""
    return [name for name, each in parameters.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function; of one in C that does not tell them, none."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"lightrft_reward_{path.stem}_{abs(hash(str(path)))}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"reward file {path} is no Python file. Remedy: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    event_loop()
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    with CaptureException() as captured:
        spec.loader.exec_module(module)
    if captured.cause is not None:
        raise UserError(
            f"reward file {path} raises while it is imported. Remedy: correct the file\n{captured.text_below(__file__)}"
        )
    return module


def _choose(module: ModuleType, path: str, function: str) -> tuple[str, Callable[..., Any]]:
    """Return the name and the function that is the reward of a file; one that is named may be any callable."""
    own = {
        name: value for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    known = f"Its functions: {', '.join(own) or 'none'}"
    if function:
        chosen = vars(module).get(function)
        if inspect.isclass(chosen):
            raise UserError(f"reward file {path}: {function} is a class. Remedy: name an object of it, such as "
                            f"reward = {function}()")
        if not callable(chosen):
            raise UserError(f"reward file {path} has no function {function!r}. {known}")
        return function, chosen
    preferred: list[str] = ["reward_func", "compute_score"]
    fitting = [name for name in preferred if name in own][:1]
    fitting = fitting or [name for name, value in own.items() if signature_of(value)]
    if len(fitting) != 1 and len(own) != 1:
        raise UserError(
            f"reward file {path}: cannot tell which function is the reward. {known}. Remedy: path.py:function, where "
            f"the function is {EXPECTED}")
    name = (fitting or [*own])[0]
    return name, own[name]


def _query_arguments(batch: list[RewardInput]) -> dict[str, Any]:
    return _columns(batch) | {
        "queries": [item.prompt + item.response for item in batch],
        "prompts": [item.prompt for item in batch],
        "labels": [item.label if item.reference is None else item.reference for item in batch],
        "turns": [item.turns for item in batch],
    }


def _completion_arguments(batch: list[RewardInput]) -> dict[str, Any]:
    return _columns(batch) | {
        "prompts": [item.messages or item.prompt for item in batch],
        "completions": [item.turns if item.messages else item.response for item in batch],
        "turns": [item.turns for item in batch],
    }


def _lists_of_compute_score(batch: list[RewardInput]) -> dict[str, Any]:
    return {
        "data_sources": [item.data_source for item in batch],
        "solution_strs": [item.response for item in batch],
        "ground_truths": [item.reference for item in batch],
        "extra_infos": [_extra_info(item) for item in batch],
        "turns": [item.turns for item in batch],
    }


def _model_reward_arguments(batch: list[RewardInput]) -> dict[str, Any]:
    """Return the arguments of LightRFT's contract; a score that is missing is nan."""
    columns = _query_arguments(batch)
    names = [*batch[0].model_rewards] if batch else []
    return columns | {"model_reward_list": [_tensor([item.model_rewards[name] for item in batch]) for name in names],
                      "label_map": {name: index for index, name in enumerate(names)}, "refs": columns["references"],
                      "labels": [item.label for item in batch]}  # yapf: disable


def _tensor(scores: list[float | None]) -> Any:
    import torch  # rewards that read no model do not wait for it
    return torch.tensor([math.nan if score is None else score for score in scores])


def _score_arguments(batch: list[RewardInput]) -> dict[str, Any]:
    """Return the arguments of verl's contract for the first response."""
    item = batch[0] if batch else RewardInput("", "")
    return {"data_source": item.data_source, "solution_str": item.response, "ground_truth": item.reference,
            "extra_info": _extra_info(item), "turns": item.turns}  # yapf: disable


_ARGUMENTS = {"model_rewards": _model_reward_arguments,
              "reward_func": _query_arguments, "completions": _completion_arguments,
              "compute_score": _score_arguments, "compute_scores": _lists_of_compute_score}  # yapf: disable


def _extra_info(item: RewardInput) -> dict[str, Any]:
    return {**item.columns, **(item.columns.get("extra_info") or {})}


def _columns(batch: list[RewardInput]) -> dict[str, Any]:
    """Return columns of the data as lists; ``reference`` also under the names that functions commonly use."""
    answers = [item.reference for item in batch]
    own = {
        name: [item.columns.get(name) for item in batch] for name in {key: 0 for item in batch for key in item.columns}
    }
    return {"ground_truth": answers, "solution": answers, "answer": answers, "references": answers} | own | {
        "data_source": [item.data_source for item in batch],
        "label": [item.label for item in batch],
        "reference": answers,
    }


def _caller(function: Callable[..., Any], parameters: Mapping[str,
                                                              inspect.Parameter]) -> Callable[[dict[str, Any]], Any]:
    """Return what calls ``function`` with those of the arguments that it takes. Its parameters are read once, because
    that takes longer than many rewards."""
    kinds = {name: each.kind for name, each in parameters.items()}
    first = [each for each in parameters.values() if each.kind is each.POSITIONAL_ONLY]
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
    named = set(_named(parameters)) - {each.name for each in first}

    def call(arguments: dict[str, Any]) -> Any:
        by_position = [arguments.get(each.name, each.default) for each in first]
        others = {name: value for name, value in arguments.items()
                  if name in named or takes_all and name not in kinds}  # yapf: disable
        return awaited(function(*by_position, **others))

    return call


def awaited(result: Any) -> Any:
    """Return a result; that of an ``async`` function when it is there."""
    return wait_for(result) if inspect.isawaitable(result) else result


def _each(call: Callable[[dict[str, Any]], Any]) -> Scorer:

    def score(batch: list[RewardInput]) -> Iterator[Outcome]:
        for item in batch:
            with CaptureException() as captured:
                outcome = outcome_of(call(_score_arguments([item])))
            yield _raised(captured) if captured.cause is not None else outcome

    return score


def _raised(captured: CaptureException, count: int = 1) -> Outcome:
    """Return the outcome of each of ``count`` responses whose call has raised."""
    text = captured.text_below(__file__, *LOOP_FILES)
    if count > 1:
        return Outcome(None, "exception", f"{text}\n{REMEDY.format(count=count)}")
    return _at_fault(text) if is_response_fault(captured.cause) else Outcome(None, "exception", text)


def _at_fault(detail: str, extra: dict[str, float] | None = None) -> Outcome:
    return Outcome(0.0, detail=detail, extra=extra or {}, fault="response_fault")


def scorer_of_batches(call: Callable[[list[RewardInput]], Any]) -> Scorer:
    """Wrap a function of a batch, such as a list of numbers. If it fails for several groups, each is tried alone, and
    never a part of one: the function may compare the responses to a prompt."""

    def once(batch: list[RewardInput]) -> list[Outcome]:
        with CaptureException() as captured:
            return outcomes_of(call(batch), len(batch))
        return [_raised(captured, len(batch))] * len(batch)

    def score(batch: list[RewardInput]) -> Iterator[Outcome | None]:
        outcomes = once(batch)
        groups = [list(group) for _, group in groupby(batch, lambda item: item.group)]
        if len(groups) == 1 or not all(outcome.error in ("exception", "wrong_length") for outcome in outcomes):
            yield from outcomes
            return
        # where the length was wrong a single response fills a batch as large: a function that returns a list of one
        # length whatever it is asked would else be right
        times = len(batch) if outcomes[0].error == "wrong_length" else 1
        for group in groups:
            yield None
            yield from once(group if len(group) > 1 else group * times)[:len(group)]

    return score


def outcomes_of(result: Any, size: int) -> list[Outcome]:
    """Convert a batch result (list, tensor, or dict with ``rewards`` or ``scores`` and ``extra_logs``) to outcomes."""
    extras: dict[str, Any] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):  # (rewards, metrics)
        result = {"rewards": result[0], "extra_logs": result[1]}
    if isinstance(result, dict):
        if not {"rewards", "scores"} & result.keys():
            return [Outcome(None, "wrong_type", _lacks(result, "'rewards'"))] * size
        extras = dict(
            result.get("extra_logs") or {},
            **({"scores": result["scores"]} if {"rewards", "scores"} <= result.keys() else {}))
        result = result.get("rewards", result.get("scores"))
    values = _listed(result)
    if values is None:
        return [
            Outcome(None, "none" if result is None else "wrong_type",
                    f"expected a list of {size} numbers, got {result!r:.200}")
        ] * size
    if len(values) != size:
        return [Outcome(None, "wrong_length", f"{len(values)} rewards for {size} responses")] * size
    columns = {name: _listed(value) if _listed(value) is not None else [value] * size for name, value in extras.items()}
    return [
        outcome_of(value,
                   {name: column[i] for name, column in columns.items() if column is not None and len(column) == size})
        for i, value in enumerate(values)
    ]


def outcome_of(result: Any, extra: dict[str, Any] | None = None) -> Outcome:
    """Convert one result to an outcome: a number, or a dict with ``score`` whose other numbers become metrics."""
    extra = dict(extra or {})
    if isinstance(result, dict):
        if "score" not in result:
            return Outcome(None, "wrong_type", _lacks(result, "'score'"))
        extra |= {name: value for name, value in result.items() if name != "score"}
        result = result["score"]
    if result is None:
        return Outcome(
            None, "none", "the reward returned None, which leaves the response out of the loss and of the mean. "
            "Where it is wrong, return 0.0")
    numbers = {name: _number(item) for name, item in extra.items()}
    known = {name: item for name, item in numbers.items() if item is not None and math.isfinite(item)}
    if isinstance(result, BaseException):
        return _at_fault(repr(result), known) if is_response_fault(result) else Outcome(None, "exception", repr(result))
    value = _number(result)
    if value is None:
        return Outcome(None, "wrong_type", f"expected a number, got {result!r:.200}")
    if not abs(value) <= LARGEST:
        return Outcome(None, "not_finite", f"the reward is {value}; its statistics need at most {LARGEST:g} in size")
    return Outcome(value, extra=known)


def _lacks(result: dict[Any, Any], key: str) -> str:
    return f"the dict has no {key} (it has {', '.join(map(str, result)) or 'nothing'})"[:200]


def _listed(value: Any) -> list[Any] | None:
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, (list, tuple)) else None


def _number(value: Any) -> float | None:
    value = value.item() if hasattr(value, "item") and not isinstance(value, dict) else value
    return float(value) if isinstance(value, (int, float)) else None
