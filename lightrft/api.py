"""Training from a Python program or a notebook: the options of the command line as keywords."""
import inspect
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, count, islice
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lightrft.cli.command_line import on_one_machine, refuse_early
from lightrft.cli.offline import OFFLINE, OfflineCommand
from lightrft.config.cli import exit_on_config_error, parse_keywords, ParsedConfig
from lightrft.config.options import split_commas
from lightrft.config.plugins import Plugins
from lightrft.config.schema import Config
from lightrft.rewards.base import REWARDS
from lightrft.utils.errors import end_in_one_line, UserError
from lightrft.utils.hub import read_pretrained
from lightrft.utils.tables import of_fixed_data

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from lightrft.trainer.trial import TrialContext

Data = str | Path | Iterable[Any]  # files, folders or hub ids; a data set, a table or a list of rows
ROWS = "give a path, a hub id, a list of dicts, a Hugging Face Dataset or a pandas DataFrame"
Reward = str | Callable[..., Any] | tuple[str | Callable[..., Any], float]


@dataclass(frozen=True)
class Run:
    """Result of a training run: everything is in ``folder``."""
    folder: Path

    @property
    def metrics(self) -> "pd.DataFrame":
        """One row per step and one column per metric; NaN where a step did not measure it.

        Evaluations, rewards and losses come first, memory and times last.
        """
        import pandas as pd
        table = pd.read_json(self.folder / "metrics.jsonl", lines=True).groupby("step", as_index=False).last()
        return table[sorted(table, key=_place)]

    def model(self) -> "PreTrainedModel":
        """Load the trained model in its own class, with LoRA adapters merged."""
        from lightrft.models.loader import load_exported
        return load_exported(str(self.folder / "hf"))

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load its tokenizer."""
        from transformers import AutoTokenizer
        return read_pretrained(AutoTokenizer, self.folder / "hf")

    def processor(self) -> "ProcessorMixin":
        """Load the processor of a vision or audio model."""
        from transformers import AutoProcessor
        return read_pretrained(AutoProcessor, self.folder / "hf")


class _Training(ABC):
    """One run: its options are checked at construction, before anything is loaded."""
    tree: ClassVar[type]
    data: ClassVar[tuple[str, str]]  # options that name training and held-out data
    defaults: ClassVar[dict[str, Any]] = {}
    functions: Mapping[str, Callable[..., Any]] = {}  # rewards of this program, by name

    def __init__(self, model: str | Path, train_dataset: Data | None, eval_dataset: Data | None, plugins: Plugins,
                 options: dict[str, Any]) -> None:
        end_in_one_line()
        if not isinstance(model, (str, Path)):
            raise UserError(f"model: a {type(model).__name__}; give the folder or the hub id of a model, such as the "
                            "folder hf of a run")
        given = {name: value.item() if getattr(value, "ndim", None) == 0 else value for name, value in options.items()}
        keywords = dict(zip(("pretrain", *self.data), ("model", "train_dataset", "eval_dataset")))
        for (option, name), value in zip(keywords.items(), (model, train_dataset, eval_dataset)):
            if option in given and value is not None:
                raise UserError(f"{option} is given by the keyword {name} already; drop it")
            if value is not None:
                given[option] = str(value) if option == "pretrain" else _specs(value, name)
        self.parsed: ParsedConfig = parse_keywords(given, self.tree, plugins, self.defaults,
                                                   keywords | {"reward": "rewards"})

    def plan(self, gpus: str = "") -> str:
        """Return what ``--dry_run`` prints: each option and its source, batch sizes, memory and time, and what came of
        reading the data and scoring one row.

        Args:
            gpus: plan for these instead of this machine, such as "8xH100", "1x24" (GiB) or "2x8xH100"; as
                ``--plan_gpus``.

        Raises:
            UserError: the run does not fit the machine, or its data or rewards cannot be used.
        """
        from lightrft.trainer.session import planned, settled
        parsed = deepcopy(self.parsed)  # a run keeps the defaults of this machine
        parsed = parsed._replace(plan_gpus=gpus, keywords={**(parsed.keywords or {}), "plan_gpus": "gpus"})
        with parsed.own_words():
            return "\n".join(planned(parsed, settled(parsed), self._trial()))

    def _trial(self) -> "TrialContext":
        """Return what a plan tries besides the options."""
        from lightrft.trainer.trial import TrialContext
        return TrialContext(functions=self.functions)

    def train(self) -> Run:
        """Train to the end, and return the run.

        Under ``torchrun`` every rank calls it. An expected error that the program does not catch ends it with one line,
        as on the command line.

        Raises:
            ExpectedError: options, data, rewards or the model cannot be used; the message names the remedy.
            KeyboardInterrupt: the run was interrupted, after it saved a checkpoint.
        """
        exits = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if on_one_machine():
            with exit_on_config_error() if exits else nullcontext(), self.parsed.own_words():
                refuse_early(self.parsed, self.functions)
        self._train(exits)
        return Run(Path(self.parsed.config.checkpoint.save_path))

    @abstractmethod
    def _train(self, exits: bool) -> None:
        """Run the command; ``exits`` as in :func:`lightrft.trainer.session.training_session`."""


class RL(_Training):
    """Reinforcement fine-tuning: ``RL(model, rewards, train_dataset, recipe="dapo").train()``.

    Args:
        model: folder or hub id of the policy.
        rewards: one or several names as for ``--reward`` ("math", "format=0.1", "my_file.py:score"), functions of a
            known signature (:mod:`lightrft.rewards.workers.user_file`), or pairs of one of them and its weight. None:
            the recipe of each row.
        train_dataset: prompts: a Hugging Face ``Dataset``, a pandas ``DataFrame``, a list of dicts, or what
            ``--prompt_data`` takes.
        eval_dataset: held-out prompts, likewise.
        environment: answers the turns of the policy: a class (:class:`lightrft.environments.Environment`, or one of
            another trainer), a function without arguments that makes an object of one, or what ``--environment``
            takes. Without ``rewards`` its rewards are those of the run.
        tools: functions that the policy may call, one or several, in place of an environment.
        plugins: Python files, or names of modules, to import, one or several, as for ``--plugin``.
        options: every option of ``lightrft train --help all``, by name.

    Raises:
        ConfigError: an unknown option (with the nearest known one) or an impossible value.
    """
    tree, data = Config, ("prompt_data", "eval_data")

    def __init__(self, model: str | Path, rewards: Reward | Sequence[Reward] | None = None,
                 train_dataset: Data | None = None, eval_dataset: Data | None = None, *,
                 environment: str | Path | Callable[[], Any] | None = None,
                 tools: Callable[..., Any] | Sequence[Callable[..., Any]] = (), plugins: Plugins = (),
                 **options: Any) -> None:
        tools = [tools] if callable(tools) else tools
        if rewards is not None:
            if "reward" in options:
                raise UserError("reward is given by the keyword rewards already; drop it")
            options["reward"], self.functions = _selected(_listed(rewards))
        if environment is not None or tools:
            options["environment"], objects = _environment(environment, tools)
            self.functions = {**self.functions, **objects}
            if not tools and "reward" not in options:
                options["reward"] = ["environment"]
        super().__init__(model, train_dataset, eval_dataset, plugins, options)

    def _train(self, exits: bool) -> None:
        from lightrft.cli.train import train
        train(self.parsed, exits, self.functions)


class GRPO(RL):
    """Group relative policy optimization (arXiv:2402.03300): ``GRPO(model, rewards, train_dataset).train()``.

    Args:
        model: folder or hub id of the policy.
        rewards: functions such as ``f(solution_str, ground_truth)`` or ``f(completions, **columns)``, names such as
            "math", or a list of these; a pair of one of them and a number has that weight.
        train_dataset: prompts: a list of dicts with "prompt" and "reference", a Hugging Face ``Dataset``, a pandas
            ``DataFrame`` or a path.
        eval_dataset: held-out prompts, likewise.
        options: every option of ``lightrft train --help all``, by name.
    """
    defaults = {"advantage_estimator": "group_norm"}


class _Offline(_Training):
    """Training on fixed data."""
    data = ("train_data", "eval_data")
    command: ClassVar[OfflineCommand]

    def __init_subclass__(cls) -> None:
        cls.tree = cls.command.tree

    def __init__(self, model: str | Path, train_dataset: Data, eval_dataset: Data | None = None, *,
                 plugins: Plugins = (), **options: Any) -> None:
        """Check the options.

        Args:
            model: folder or hub id of the model.
            train_dataset: rows: a Hugging Face ``Dataset``, a pandas ``DataFrame``, a list of dicts, or what
                ``--train_data`` takes.
            eval_dataset: held-out rows, likewise.
            plugins: Python files, or names of modules, to import, one or several, as for ``--plugin``.
            options: every option that ``--help all`` of the command lists, by name.
        """
        super().__init__(model, train_dataset, eval_dataset, plugins, options)

    def _trial(self) -> "TrialContext":
        from lightrft.trainer.trial import TrialContext
        return TrialContext(trainer=self.command.trainer_class())

    def _train(self, exits: bool) -> None:
        self.command.train(self.parsed, exits)


class SFT(_Offline):
    """Supervised fine-tuning on conversations: ``SFT(model, train_dataset).train()``, the command ``lightrft sft``."""
    command = OFFLINE["sft"]


class DPO(_Offline):
    """Training on pairs of answers: ``DPO(model, train_dataset, loss="sigmoid").train()``, the command
    ``lightrft dpo``."""
    command = OFFLINE["dpo"]


class KTO(_Offline):
    """Training on answers that are good or bad: ``KTO(model, train_dataset).train()``, the command ``lightrft kto``."""
    command = OFFLINE["kto"]


class KD(_Offline):
    """Distillation: ``KD(model, train_dataset, teacher_model=...).train()``, the command ``lightrft kd``."""
    command = OFFLINE["kd"]


class RM(_Offline):
    """Training of a scalar reward model on pairs: ``RM(model, train_dataset).train()``, the command ``lightrft rm``."""
    command = OFFLINE["rm"]


class GRM(_Offline):
    """Training of a generative judge on pairs: ``GRM(model, train_dataset).train()``, the command ``lightrft grm``."""
    command = OFFLINE["grm"]


class PRM(_Offline):
    """Training of a process reward model on labelled steps: ``PRM(model, train_dataset, placeholder_token="#",
    reward_tokens=["+", "-"]).train()``, the command ``lightrft prm``."""
    command = OFFLINE["prm"]


def _place(metric: str) -> tuple[bool, bool, bool, bool, str]:
    """Return the sort key of a metric in the table of a run."""
    late = metric.startswith(("perf/", "time/"))
    learnt = metric.startswith("reward/") or bool(of_fixed_data([metric], "(loss|accuracy)"))
    return (metric != "step", late, not metric.startswith("eval/"), not learnt, metric)


def _specs(data: Data, option: str) -> list[str]:
    """Return the entries of a data option; rows stay in memory."""
    from lightrft.datasets.rows import hold_rows
    if isinstance(data, (str, Path)):
        return [str(data)]
    if isinstance(data, (list, tuple)) and data and all(isinstance(each, (str, Path)) for each in data):
        for text in filter(_is_prose, map(str, data)):
            row = {"prompt": text[:40]}
            raise UserError(f"{option}: {text[:80]!r} is no path; a row is a dict, such as {row}")
        return [str(each) for each in data]
    if isinstance(data, dict):
        raise UserError(f"{option}: a dict of {', '.join(map(str, data))}; {_of_a_dict(data)}")
    if not isinstance(data, Iterable):
        raise UserError(f"{option}: {data!r} holds no rows; {ROWS}")
    readers = {"pandas": _records, "datasets": _encoded}
    read = readers.get(type(data).__module__.partition(".")[0])
    rows = iter(read(data) if read else data)
    first = list(islice(rows, 1))
    if not first:
        raise UserError(f"{option}: the {type(data).__name__} is empty; {ROWS}")
    return [hold_rows(chain(first, rows))]


def _is_prose(text: str) -> bool:
    """Return True for a text that is neither a path nor a hub id: it has a space and no such file."""
    return " " in text.strip() and not Path(text.partition("@")[2] or text).expanduser().exists()


def _of_a_dict(data: dict[Any, Any]) -> str:
    """Say what to give instead of a dict of data sets, of columns or of the values of one row."""
    if all(isinstance(value, (list, tuple)) and not any(isinstance(each, dict) for each in value)
           for value in data.values()):  # yapf: disable
        return "these are columns; give datasets.Dataset.from_dict(...) of it, or a list of rows, one dict each"
    one_row = any(isinstance(value, (str, int, float)) for value in data.values())
    return "this is one row; give a list of rows" if one_row else "give one of its data sets"


def _encoded(dataset: Any) -> Iterable[dict[str, Any]]:
    """Return a data set of Hugging Face whose media stay bytes and paths, as in files: what reads rows decodes them,
    and the library that ``datasets`` decodes with is not needed."""
    features = deepcopy(dataset.features)
    decoded = [feature for feature in _leaves(features) if getattr(feature, "decode", False)]
    for feature in decoded:
        feature.decode = False
    if not decoded:
        return dataset
    return dataset.cast(features) if hasattr(dataset, "__len__") else dataset.decode(False)  # a stream decodes ahead


def _leaves(feature: Any) -> Iterator[Any]:
    """Yield the types of single values in the (nested) type of a column; None: a stream that does not know it."""
    if isinstance(feature, dict):
        inner = [*feature.values()]
    elif isinstance(feature, (list, tuple)):
        inner = [*feature]
    elif hasattr(feature, "feature"):
        inner = [feature.feature]
    else:
        yield feature
        return
    for each in inner:
        yield from _leaves(each)


def _records(table: Any) -> list[dict[str, Any]]:
    """Return the rows of a pandas table; a missing value is None."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def _listed(rewards: Reward | Sequence[Reward]) -> Iterable[Reward]:
    """Return one or several rewards as a sequence; a text is split at commas, as ``--reward`` is."""
    if isinstance(rewards, str):
        return split_commas(rewards)
    pair = isinstance(rewards, tuple) and len(rewards) == 2 and isinstance(rewards[1], Real)
    several: Any = rewards
    return several if isinstance(rewards, Sequence) and not pair else [several]


def _environment(environment: str | Path | Callable[[], Any] | None,
                 tools: Sequence[Callable[..., Any]]) -> tuple[str, dict[str, Any]]:
    """Return the entry of ``--environment``, and the objects of this program that it names."""
    if environment is not None and tools:
        raise UserError("environment and tools: an environment has its own tools; give one of the two")
    if isinstance(environment, (str, Path)):
        return str(environment), {}
    if environment is None:
        wrong = next((tool for tool in tools if not callable(tool)), None)
        if wrong is not None:
            raise UserError(f"tools: {wrong!r} is no function")
        return "tools of this program", {"tools of this program": [*tools]}
    if not callable(environment):
        raise UserError(f"environment: {environment!r} is no class; one object of it is made for each response. Give "
                        "its class, or a function that makes it")
    name = f"{getattr(environment, '__name__', 'a partial')} of this program"
    return name, {name: environment}


def _selected(rewards: Iterable[Reward]) -> tuple[list[str], dict[str, Callable[..., Any]]]:
    """Return the entries of ``--reward``, and the functions among them by name; a repeated name gets a number."""
    entries: list[str] = []
    functions: dict[str, Callable[..., Any]] = {}
    for reward in rewards:
        scorer, weight = reward if isinstance(reward, tuple) and len(reward) == 2 else (reward, None)
        if not isinstance(weight, (Real, type(None))):
            raise UserError(f"rewards: the weight of {scorer!r} is {weight!r}; give a number, or a list of rewards")
        if isinstance(scorer, str):
            entries.append(scorer if weight is None else f"{scorer}={weight:g}")
            continue
        if not callable(scorer):
            raise UserError(f"rewards: {reward!r} is no name, no function and no pair of one of them and its weight; "
                            "for example [\"math\", my_function], or [(\"math\", 0.9), (my_function, 0.1)]")
        title = scorer.__name__ if inspect.isfunction(scorer) else type(scorer).__name__
        word = re.sub(r"\W+", "", title)
        taken = {*functions, *REWARDS, *(entry.partition("=")[0] for entry in entries)}
        names = chain([word], (f"{word}{number}" for number in count(2)))
        name = next(each for each in names if each not in taken)
        functions[name] = scorer
        entries.append(f"{name}={1.0 if weight is None else weight:g}")
    return entries, functions
