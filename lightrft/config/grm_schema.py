"""Options of generative judges: their training on judgements, as supervised fine-tuning."""
from dataclasses import dataclass

from lightrft.config.offline_schema import OfflineConfig, OfflineDataConfig
from lightrft.config.options import COUNT, option
from lightrft.config.sft_schema import SFTTrainConfig
from lightrft.config.tree import group


@dataclass(frozen=True)
class JudgeFormat:
    """Format of the requests to a judge; ``config.json`` of a trained one has it.

    Attributes:
        instruction: text of the request, with {prompt}, {first} and {second}.
        system_prompt, input_template: as the options of these names.
    """
    instruction: str
    system_prompt: str | None = None
    input_template: str | None = None


@dataclass
class JudgeDataConfig(OfflineDataConfig):
    """Pairs of candidates with a judgement, and their rendering."""
    prompt_key: str = option("prompt", "column that holds the question (text or chat messages)")
    chosen_key: str = option("chosen", "column that holds the better candidate (text, or messages that end with it)")
    rejected_key: str = option("rejected", "column that holds the worse candidate")
    judgement_key: str = option(
        "judgement", "column that holds the judge's reasoning, in which {chosen} and {rejected} stand for the names of "
        "the candidates; without it the judge learns the answer alone")
    task_instruction: str | None = option(
        None,
        "text of the request, with {prompt}, {first} and {second} once each, in this order (default: asks which of "
        "two responses is better, and for an answer in <answer> tags)")


@dataclass
class JudgeTrainConfig(SFTTrainConfig):
    """The optimizer, its batches, the length of the run, the load of experts, and the evaluation."""
    generate_max_len: int = option(512, "longest judgement of an evaluation, in tokens", within=COUNT, free=True,
                                   common=True)


@dataclass
class GRMConfig(OfflineConfig):
    """The whole option tree of ``lightrft.cli.train_grm``."""
    data: JudgeDataConfig = group(JudgeDataConfig)
    train: JudgeTrainConfig = group(JudgeTrainConfig)

    METRICS = ("grm", "eval")
    ROWS = "judgements"
