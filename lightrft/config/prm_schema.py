"""Options of process reward models, which judge every step of a solution."""
from dataclasses import dataclass, field
from typing import Any

from lightrft.config.offline_schema import OfflineConfig, OfflineDataConfig
from lightrft.config.options import option
from lightrft.config.tree import group
from lightrft.utils.errors import UserError


def line_breaks(text: str) -> str:
    r"""Replace ``\n`` as it is typed in a shell by the line break that it stands for."""
    return text.replace("\\n", "\n")


@dataclass(frozen=True)
class StepFormat:
    """Format in which a model reads steps and gives its judgement; ``config.json`` of a trained model has it.

    Attributes:
        placeholder_token: follows every step; the model judges the step there.
        reward_tokens: among which it chooses, the one of a good step first; none: all tokens.
        step_separator: between two steps.
    """
    placeholder_token: str
    reward_tokens: list[str] = field(default_factory=list)
    step_separator: str = "\n"

    @property
    def graded(self) -> bool:
        """True with two reward tokens: a label is then the probability of the first one, else the number of a
        class."""
        return len(self.reward_tokens) == 2

    def placeholder_id(self, tokenizer: Any) -> int:
        """Return the token of the placeholder."""
        return single_token(tokenizer, self.placeholder_token, "--placeholder_token")

    def reward_ids(self, tokenizer: Any) -> list[int]:
        """Return the reward tokens.

        Raises:
            UserError: one of them is not a single token, or two are the same.
        """
        ids = [single_token(tokenizer, text, "--reward_tokens") for text in self.reward_tokens]
        if len(set(ids)) < len(ids):
            raise UserError(f"--reward_tokens {' '.join(self.reward_tokens)}: two of them are one token of the "
                            "tokenizer; name different ones")
        return ids


def single_token(tokenizer: Any, text: str, flag: str) -> int:
    """Return the one token that ``text`` is.

    Raises:
        UserError: it is several tokens, or none that the tokenizer knows.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        count = f"{len(ids)} tokens" if len(ids) != 1 else "unknown"
        raise UserError(f"{flag} {text!r} is {count} to the tokenizer {tokenizer.name_or_path!r}; name a text that is "
                        "one token of its own")
    return int(ids[0])


@dataclass
class StepDataConfig(OfflineDataConfig):
    """Solutions with a label for every step, and their rendering."""
    input_key: str = option(
        "input", "column that holds a whole solution, with --placeholder_token after every step; a row without it has "
        "prompt, completions and labels")
    label_key: str = option("label", "column that holds the list of labels of the steps")
    placeholder_token: str | None = option(
        None, "token that follows every step, at which the model judges it, e.g. <|reserved_0|>", common=True)
    reward_tokens: list[str] = option(
        [], "tokens of the judgements, the one of a good step first, e.g. + -; with two of them labels may be numbers "
        "in [0, 1] or true and false; none: the whole vocabulary", common=True)
    step_separator: str = option("\\n", "text between the steps of rows with completions, and of responses in RL")
    apply_chat_template: bool = option(
        False, "render text prompts of rows with completions as one user turn with the tokenizer's chat template "
        "(message lists always are)", common=True)
    step_policy: str = option("error",
                              "a row without a label for each of its steps stops the run, or is left out and counted",
                              ("error", "skip"))

    @property
    def form(self) -> StepFormat:
        """The format of steps."""
        return StepFormat(str(self.placeholder_token), self.reward_tokens, line_breaks(self.step_separator))


@dataclass
class PRMConfig(OfflineConfig):
    """The whole option tree of ``lightrft.cli.train_prm``."""
    data: StepDataConfig = group(StepDataConfig)

    METRICS = ("prm", "eval")
    ROWS = "solutions"
