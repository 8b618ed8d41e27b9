"""Options of supervised fine-tuning."""
from dataclasses import dataclass

from lightrft.config.offline_schema import OfflineConfig, OfflineDataConfig, OfflineTrainConfig

SFTDataConfig, SFTTrainConfig = OfflineDataConfig, OfflineTrainConfig  # it has the options that all share


@dataclass
class SFTConfig(OfflineConfig):
    """The whole option tree of ``lightrft.cli.train_sft``."""
    METRICS = ("sft", "eval")
    ROWS = "conversations"
