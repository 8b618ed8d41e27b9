"""Options of supervised fine-tuning: the groups it shares with the RL trainer, and its own."""
from dataclasses import dataclass

from lightrft.config.options import COUNT, NON_NEGATIVE, option
from lightrft.config.schema import DataConfig
from lightrft.config.shared_schema import (CheckpointConfig, OptimConfig, PolicyModelConfig, SinkConfig, StrategyConfig,
                                           Tree)
from lightrft.config.tree import group


@dataclass
class SFTDataConfig:
    """Demonstrations and their rendering."""
    train_data: list[str] = option([],
                                   "demonstrations: file, folder or hub id, 'path@data_dir'; several are concatenated",
                                   common=True)
    eval_data: list[str] = option([], "held-out demonstrations, same forms", free=True, common=True)
    train_split: str = option("train", "split of --train_data to use")
    eval_split: str = option("test", "split of --eval_data to use", free=True)
    max_len: int = option(2048, "longest conversation, in tokens; longer ones are dropped and counted", within=COUNT,
                          common=True)
    max_samples: int = option(0, "use at most this many demonstrations; 0: all", within=NON_NEGATIVE)
    chat_template: str | None = option(
        None, "a Jinja file, or one of the built-in template names, that replaces the tokenizer's own")
    system_prompt: str | None = option(None, "system message of every conversation; it replaces the one a row brings")
    shuffle: bool = option(True, "draw demonstrations in a new seeded order each epoch")

    def as_data_config(self) -> DataConfig:
        """Convert to the data group of the RL trainer, which the data sets read."""
        return DataConfig(prompt_data=self.train_data, eval_data=self.eval_data, prompt_split=self.train_split,
                          eval_split=self.eval_split, max_samples=self.max_samples, chat_template=self.chat_template,
                          system_prompt=self.system_prompt, max_eval_samples=0)


@dataclass
class SFTTrainConfig(OptimConfig):
    """The optimizer, its batches and the length of the run."""
    learning_rate: float = option(1e-5, "peak learning rate", within=NON_NEGATIVE, common=True)
    max_epochs: int = option(1, "passes over the demonstrations", within=COUNT, free=True, common=True)
    eval_steps: int = option(-1, "optimizer steps between evaluations; -1: at the end only; 0: never",
                             within="[-1, inf)", free=True, common=True)


@dataclass
class SFTConfig(Tree):
    """The whole option tree of ``lightrft.cli.train_sft``."""
    model: PolicyModelConfig = group(PolicyModelConfig)
    strategy: StrategyConfig = group(StrategyConfig, free=True)
    data: SFTDataConfig = group(SFTDataConfig)
    train: SFTTrainConfig = group(SFTTrainConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig, free=True)
    log: SinkConfig = group(SinkConfig, free=True)

    BATCH = "train_batch_size"
    METRICS = ("sft", "eval")
