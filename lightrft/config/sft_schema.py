"""Options of supervised fine-tuning."""
from dataclasses import dataclass

from lightrft.config.offline_schema import OfflineConfig, OfflineDataConfig, OfflineTrainConfig
from lightrft.config.options import option
from lightrft.config.shared_schema import BalanceConfig
from lightrft.config.tree import group


@dataclass
class SFTTrainConfig(BalanceConfig, OfflineTrainConfig):
    """The optimizer, its batches, the length of the run, and the load of experts."""


@dataclass
class SFTDataConfig(OfflineDataConfig):
    """Demonstrations, their rendering, and which of their tokens are learnt."""
    COLUMNS = ("input_key", )
    input_key: str = option("prompt", "column that holds the prompt or the chat; without it, prompt, messages or input")
    output_key: str | None = option(
        None, "column that holds the answer (default: completion, response, output, answer or solution, the first that "
        "a row has)")
    multiturn: bool = option(True, "learn every assistant turn of a chat; false: only the last one")
    pretrain_mode: bool = option(
        False, "learn every token of a row, prompts included, as in pretraining; a row may be "
        "a text alone")


@dataclass
class SFTConfig(OfflineConfig):
    """The whole option tree of ``lightrft.cli.train_sft``."""
    data: SFTDataConfig = group(SFTDataConfig)
    train: SFTTrainConfig = group(SFTTrainConfig)

    TRAINING = "supervised fine-tuning"
    METRICS = ("sft", "eval")
    ROWS = "conversations"
