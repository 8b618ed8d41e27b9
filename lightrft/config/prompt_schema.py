"""Options of prompts, for every command that reads them: their sources, columns and rendering."""
from dataclasses import dataclass

from lightrft.config.media_schema import MediaConfig
from lightrft.config.options import NON_NEGATIVE, PROBABILITY, option


@dataclass
class RenderingConfig(MediaConfig):
    """Rendering of a row as the text that a model reads, and its media."""
    apply_chat_template: bool = option(
        False, "render text prompts as one user turn with the tokenizer's chat template (message lists always are)",
        common=True)
    chat_template: str | None = option(
        None, "a Jinja file, or one of the built-in template names, that replaces the tokenizer's own")
    system_prompt: str | None = option(None, "system message of every prompt; it replaces the one a row brings")
    input_template: str | None = option(None, "text with one {} that wraps every text prompt")


@dataclass
class PromptConfig(RenderingConfig):
    """Conversion of a row to a prompt: its columns and its rendering."""
    input_key: str = option("prompt", "column that holds the prompt (text or chat messages)")
    label_key: str = option("label", "column, or key of extra_info, that names the reward recipe of a row")
    reference_key: str = option("reference", "column, or key of extra_info, that holds the reference answer")
    overlong_prompt: str = option("filter",
                                  "a prompt longer than --prompt_max_len is dropped and counted, or stops the run",
                                  ("filter", "error"), free=True)
    data_workers: int = option(0, "processes that tokenize the data set; 0: in this process", within=NON_NEGATIVE,
                               free=True)


@dataclass
class PromptDataConfig(PromptConfig):
    """Sources of the prompts, and the conversion of a row to a prompt."""
    prompt_data: list[str] = option([], "prompts: file, folder or hub id, 'path@data_dir'; several are mixed",
                                    common=True)
    prompt_data_probs: list[float] = option([], "mixing probability of each --prompt_data entry (default: concatenate)",
                                            within=PROBABILITY, needs="prompt_data A,B")
    prompt_split: str = option("train", "split of --prompt_data to use")
    max_samples: int = option(0, "use at most this many prompts of --prompt_data; 0: all", within=NON_NEGATIVE)


@dataclass
class HeldOutConfig(PromptConfig):
    """Sources of held-out prompts, and the conversion of a row to a prompt."""
    eval_data: list[str] = option([], "held-out prompts, same forms", free=True, common=True)
    eval_split: str = option("test", "split of --eval_data to use", free=True)
    eval_suite: list[str] = option(
        [], "public evaluation sets, whole: math500, aime24, aime25, gpqa, gsm8k, each from the hub, or name=path from "
        "a file or folder", free=True)
    max_eval_samples: int = option(500, "use at most this many prompts of --eval_data; 0: all", within=NON_NEGATIVE,
                                   free=True)
