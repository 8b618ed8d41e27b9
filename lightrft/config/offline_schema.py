"""Options that all trainers on fixed data share: rows, their rendering, the optimizer and the length of the run."""
from dataclasses import dataclass, fields
from typing import ClassVar

from lightrft.config.options import COUNT, NON_NEGATIVE, option, PROBABILITY
from lightrft.config.prompt_schema import RenderingConfig
from lightrft.config.schema import DataConfig
from lightrft.config.shared_schema import (BalanceConfig, CheckpointConfig, OptimConfig, PolicyModelConfig, SinkConfig,
                                           StrategyConfig, Tree)
from lightrft.config.tree import group


@dataclass
class OfflineDataConfig(RenderingConfig):
    """Rows and their rendering."""
    COLUMNS: ClassVar[tuple[str, ...]] = ()  # options that name columns as those of the RL trainer do
    train_data: list[str] = option([], "training rows: file, folder or hub id, 'path@data_dir'; several are mixed",
                                   common=True, card="training data", path="rows",
                                   required="give a file, folder or hub id of the data")
    train_data_probs: list[float] = option([], "mixing probability of each --train_data entry (default: concatenate)",
                                           within=PROBABILITY, needs="train_data A,B")
    eval_data: list[str] = option([], "held-out rows; same forms as --train_data", free=True, common=True,
                                  card="held-out data", path="rows")
    train_split: str = option("train", "split of --train_data to use")
    eval_split: str = option("test", "split of --eval_data to use", free=True)
    max_len: int = option(
        2048, "longest sequence (prompt plus answer) in tokens; rows with a longer one are dropped "
        "and counted", within=COUNT, common=True)
    max_samples: int = option(0, "use at most this many training rows; 0: all", within=NON_NEGATIVE)
    shuffle: bool = option(True, "draw rows in a new seeded order in each epoch")

    def as_data_config(self) -> DataConfig:
        """Convert to the data group of the RL trainer, which the data sets read; ``COLUMNS`` mean the same there."""
        names = [*(field.name for field in fields(RenderingConfig)), "eval_data", "eval_split", "max_samples"]
        shared = {name: vars(self)[name] for name in (*names, *self.COLUMNS)}
        return DataConfig(**shared, prompt_data=self.train_data, prompt_data_probs=self.train_data_probs,
                          prompt_split=self.train_split, max_eval_samples=0)


@dataclass
class OfflineTrainConfig(BalanceConfig, OptimConfig):
    """The optimizer, its batches, the length of the run, and the load of experts."""
    learning_rate: float = option(1e-5, "peak learning rate", within=NON_NEGATIVE, common=True, card="learning rate")
    max_epochs: int = option(1, "passes over the training rows", within=COUNT, free=True, common=True)
    eval_steps: int = option(-1, "optimizer steps between evaluations; -1: at the end only; 0: never",
                             within="[-1, inf)", free=True, common=True)


@dataclass
class OfflineConfig(Tree):
    """Base of the option trees of trainers on fixed data; a tree replaces the groups to which it adds options."""
    model: PolicyModelConfig = group(PolicyModelConfig)
    strategy: StrategyConfig = group(StrategyConfig, free=True)
    data: OfflineDataConfig = group(OfflineDataConfig)
    train: OfflineTrainConfig = group(OfflineTrainConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig, free=True)
    log: SinkConfig = group(SinkConfig, free=True)

    PREFLIGHT = "lightrft.preflight.offline.OfflinePreflight"
    BATCH = "train_batch_size"
    LENGTHS = ROW_LIMITS = ("max_len", )
    TRAINING = "training on fixed data"
    SYNONYMS = {"dataset": "train_data", "dataset_split": "train_split", "dataset_probs": "train_data_probs"}
    ROWS: ClassVar[str]  # the word for its rows


@dataclass
class PairDataConfig(OfflineDataConfig):
    """Pairs of a better and a worse answer, and their rendering."""
    prompt_key: str = option(
        "prompt", "column that holds the prompt (text or chat messages); if a row lacks it: messages, input, "
        "instruction, conversations or question, else the common beginning of both answers", common=True)
    chosen_key: str = option("chosen", "column that holds the better answer (text or chat messages)", common=True)
    rejected_key: str = option("rejected", "column that holds the worse answer", common=True)
    pair_policy: str = option(
        "error", "a row without a prompt, with equal answers, or with a missing or empty answer stops the run (error), "
        "or is left out and counted (skip)", ("error", "skip"))


@dataclass
class PairConfig(OfflineConfig):
    """Base of the option trees of trainers on pairs."""
    data: PairDataConfig = group(PairDataConfig)

    SEQUENCES = 2
    ROWS = "pairs"
    SYNONYMS = {"input_key": "prompt_key"}
