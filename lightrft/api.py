"""Training from a Python program or a notebook: the options of the command line as keywords."""
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lightrft.config.cli import parse_keywords, ParsedConfig
from lightrft.config.schema import Config
from lightrft.config.sft_schema import SFTConfig
from lightrft.rewards.base import REWARDS
from lightrft.utils.env import World
from lightrft.utils.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Data = str | Path | Iterable[dict[str, Any]]  # a file, a folder or a hub id; a data set or a list of rows
Reward = str | Callable[..., Any] | tuple[Callable[..., Any], float]


@dataclass(frozen=True)
class Run:
    """Result of a training run: everything is in ``folder``."""
    folder: Path

    @property
    def metrics(self) -> "pd.DataFrame":
        """One row per step and one column per metric; NaN where a step did not measure it."""
        import pandas as pd
        return pd.read_json(self.folder / "metrics.jsonl", lines=True).groupby("step", as_index=False).last()

    def model(self) -> "PreTrainedModel":
        """Load the trained model, with LoRA adapters merged."""
        from transformers import AutoModelForCausalLM
        return AutoModelForCausalLM.from_pretrained(self.folder / "hf")

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load its tokenizer."""
        from transformers import AutoTokenizer
        return AutoTokenizer.from_pretrained(self.folder / "hf")


class _Training(ABC):
    """One run: its options are checked at construction, before anything is loaded."""
    tree: ClassVar[type]
    data: ClassVar[tuple[str, str]]  # options that name training and held-out data
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: str | Path, train_dataset: Data | None, eval_dataset: Data | None, plugins: Sequence[str],
                 options: dict[str, Any]) -> None:
        given = dict(options)
        for name, option, value in (("model", "pretrain", model), ("train_dataset", self.data[0], train_dataset),
                                    ("eval_dataset", self.data[1], eval_dataset)):
            if option in given:
                raise UserError(f"{option} is given by the keyword {name} already; drop it")
            if value is not None:
                given[option] = str(value) if option == "pretrain" else _specs(value, option)
        self.parsed: ParsedConfig = parse_keywords(given, self.tree, plugins, self.defaults)

    def plan(self) -> str:
        """Return the plan that ``--dry_run`` prints: each option and its source, batch sizes, memory and time."""
        from lightrft.preflight.report import report
        from lightrft.trainer.session import settled
        return report(self.parsed.config, self.parsed.provenance, settled(self.parsed))

    def train(self) -> Run:
        """Train to the end, and return the run.

        Under ``torchrun`` every rank calls it, and an expected error ends the process with one line, as on the command
        line.

        Raises:
            ExpectedError: options, data, rewards or the model cannot be used; the message names the remedy.
            KeyboardInterrupt: the run was interrupted, after it saved a checkpoint.
        """
        self._train(World.from_env().world_size > 1)
        return Run(Path(self.parsed.config.checkpoint.save_path))

    @abstractmethod
    def _train(self, exits: bool) -> None:
        """Run the command; ``exits`` as in :func:`lightrft.trainer.session.training_session`."""


class RL(_Training):
    """Reinforcement fine-tuning: ``RL(model, rewards, train_dataset, recipe="dapo").train()``.

    Args:
        model: folder or hub id of the policy.
        rewards: names as for ``--reward`` ("math", "format=0.1", "my_file.py:score"), functions of a known signature
            (:mod:`lightrft.rewards.workers.user_file`), or pairs of a function and its weight. None: the recipe of each
            row.
        train_dataset: prompts: a Hugging Face ``Dataset``, a list of dicts, or what ``--prompt_data`` takes.
        eval_dataset: held-out prompts, likewise.
        plugins: modules to import, as for ``--plugin``.
        options: every option of ``python -m lightrft.cli.train --help all``, by name.

    Raises:
        ConfigError: an unknown option (with the nearest known one) or an impossible value.
    """
    tree, data = Config, ("prompt_data", "eval_data")
    functions: dict[str, Callable[..., Any]] = {}  # rewards of this program, by name

    def __init__(self, model: str | Path, rewards: Reward | Sequence[Reward] | None = None,
                 train_dataset: Data | None = None, eval_dataset: Data | None = None, *, plugins: Sequence[str] = (),
                 **options: Any) -> None:
        if rewards is not None:
            several = isinstance(rewards, Sequence) and not isinstance(rewards, (str, tuple))
            chosen: Any = rewards if several else [rewards]
            options["reward"], self.functions = _selected(chosen)
        super().__init__(model, train_dataset, eval_dataset, plugins, options)

    def _train(self, exits: bool) -> None:
        from lightrft.cli.train import train
        train(self.parsed, exits, self.functions)


class GRPO(RL):
    """:class:`RL` with the advantage estimator of GRPO (arXiv:2402.03300)."""
    defaults = {"advantage_estimator": "group_norm"}


class SFT(_Training):
    """Supervised fine-tuning: ``SFT(model, train_dataset).train()``.

    Args:
        model: folder or hub id of the model.
        train_dataset: conversations: a Hugging Face ``Dataset``, a list of dicts, or what ``--train_data`` takes.
        eval_dataset: held-out conversations, likewise.
        plugins: modules to import, as for ``--plugin``.
        options: every option of ``python -m lightrft.cli.train_sft --help all``, by name.
    """
    tree, data = SFTConfig, ("train_data", "eval_data")

    def __init__(self, model: str | Path, train_dataset: Data, eval_dataset: Data | None = None, *,
                 plugins: Sequence[str] = (), **options: Any) -> None:
        super().__init__(model, train_dataset, eval_dataset, plugins, options)

    def _train(self, exits: bool) -> None:
        from lightrft.cli.train_sft import train
        train(self.parsed, exits)


def _specs(data: Data, option: str) -> list[str]:
    """Return the entries of a data option; rows stay in memory."""
    from lightrft.datasets.rows import hold_rows
    if isinstance(data, (str, Path)):
        return [str(data)]
    if isinstance(data, dict):
        raise UserError(f"{option}: a dict of {', '.join(map(str, data))}; give one of its data sets")
    return [hold_rows(data)]


def _selected(rewards: Iterable[Reward]) -> tuple[list[str], dict[str, Callable[..., Any]]]:
    """Return the entries of ``--reward``, and the functions among them by name; a repeated name gets a number."""
    entries: list[str] = []
    functions: dict[str, Callable[..., Any]] = {}
    for reward in rewards:
        if isinstance(reward, str):
            entries.append(reward)
            continue
        function, weight = reward if isinstance(reward, tuple) else (reward, 1.0)
        if not callable(function):
            raise UserError(f"rewards: {reward!r} is no name, no function and no pair of a function and its weight")
        title = function.__name__ if inspect.isfunction(function) else type(function).__name__
        word = re.sub(r"\W+", "", title)
        taken = {*functions, *REWARDS, *(entry.partition("=")[0] for entry in entries)}
        names = chain([word], (f"{word}{number}" for number in count(2)))
        name = next(each for each in names if each not in taken)
        functions[name] = function
        entries.append(f"{name}={weight:g}")
    return entries, functions
