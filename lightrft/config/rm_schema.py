"""Options of reward models: scores of pairs (rm), judgements of steps (prm), judges that generate (grm)."""
from dataclasses import dataclass, field
from typing import Any

from lightrft.config.offline_schema import OfflineConfig, OfflineDataConfig, OfflineTrainConfig, PairConfig
from lightrft.config.options import ANY, COUNT, line_breaks, NON_NEGATIVE, option
from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.config.tree import group
from lightrft.utils.errors import UserError

_LIGHTRFT = {"actor_learning_rate": "learning_rate", "prompt_max_len": "max_len"}  # flags of its reward models


@dataclass
class RewardModelConfig(PolicyModelConfig):
    """The trained model, its reward head, precision and adapters."""
    value_head_prefix: str = option("score", "name of the reward head in checkpoints; Hugging Face calls it score")
    heads_types: list[str] = option(["preference"], "names of the scores; the first one is the reward, the "
                                    "others learn from the column 'heads' of a row")
    pooling_method: str = option(
        "last", "input of the head: last, the hidden state of the last token; attn, a learned average over all tokens "
        "(not loadable as a Hugging Face sequence classifier)", ("last", "attn"))
    probing_layer: int = option(
        -1,
        "decoder layer whose hidden states the head reads, after the final norm: 0 the embeddings, -1 the last layer; "
        "later layers are removed", within=ANY)
    scale_for_train: bool = option(
        False, "multiply scores by a learned number per head, 1 / 0.07 at the start; only in training, not in "
        "evaluation or use")


@dataclass
class RMTrainConfig(OfflineTrainConfig):
    """The loss, the optimizer, its batches and the length of the run."""
    loss: str = option(
        "sigmoid", "loss of a pair with rewards c (chosen) and r (rejected). sigmoid: -log sigmoid(c - r - "
        "margin); logexp: log(1 + exp(r - c)); hps: cross-entropy of softmax(c, r), equal to logexp",
        ("sigmoid", "logexp", "hps"), common=True)
    margin: float = option(
        0.0, "margin of --loss sigmoid, for pairs without one of their own (column margin) and for scores beside the "
        "first one; ties have none", within=NON_NEGATIVE)


@dataclass
class RMConfig(PairConfig):
    """The whole option tree of ``lightrft.cli.train_rm``."""
    model: RewardModelConfig = group(RewardModelConfig)
    train: RMTrainConfig = group(RMTrainConfig)

    PREFLIGHT = "lightrft.preflight.offline.RMPreflight"
    SYNONYMS = _LIGHTRFT | {"loss_type": "loss"}
    TRAINING = "training as a reward model"
    TASK = "text-classification"
    METRICS = ("rm", "eval")


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
        None, "token after every step, at which the model judges the step, e.g. <|reserved_0|>", common=True,
        required="name the token that follows every step of the solutions, e.g. a reserved one of the tokenizer")
    reward_tokens: list[str] = option(
        [], "tokens of the judgements, the one for a good step first, e.g. + -; with exactly two, labels may be "
        "numbers in [0, 1] or true and false; empty: the whole vocabulary", common=True)
    step_separator: str = option("\\n", "text between the steps of rows with completions, and of responses in RL")
    apply_chat_template: bool = option(
        False, "render text prompts of rows with completions as one user turn with the tokenizer's chat template "
        "(message lists always are)", common=True)
    step_policy: str = option(
        "error", "a row whose labels and steps do not match stops the run (error), or is left out and "
        "counted (skip)", ("error", "skip"))

    @property
    def form(self) -> StepFormat:
        """The format of steps."""
        return StepFormat(str(self.placeholder_token), self.reward_tokens, line_breaks(self.step_separator))


@dataclass
class PRMConfig(OfflineConfig):
    """The whole option tree of ``lightrft.cli.train_prm``."""
    data: StepDataConfig = group(StepDataConfig)

    PREFLIGHT = "lightrft.preflight.offline.PRMPreflight"
    TASK = "token-classification"
    METRICS = ("prm", "eval")
    ROWS = "solutions"


@dataclass(frozen=True)
class JudgeFormat:
    """Format of the requests to a judge; ``config.json`` of a trained one has it.

    Attributes:
        instruction: text of the request, with {prompt}, {first} and {second}.
        system_prompt, input_template, chat_template_kwargs: as the options of these names.
    """
    instruction: str
    system_prompt: str | None = None
    input_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class JudgeDataConfig(OfflineDataConfig):
    """Pairs of candidates with a judgement, and their rendering."""
    prompt_key: str = option("prompt", "column that holds the question (text or chat messages)")
    chosen_key: str = option("chosen", "column that holds the better candidate (text, or messages that end with it)")
    rejected_key: str = option("rejected", "column that holds the worse candidate")
    judgement_key: str = option(
        "judgement", "column that holds the text of the judge, with {chosen} and {rejected} for the names of the "
        "candidates; without it the judge learns only the answer")
    task_instruction: str | None = option(
        None, "text of the request, with {prompt}, {first} and {second} once each, in this order (default: asks which "
        "response is better, with the answer in <answer> tags)")


@dataclass
class JudgeTrainConfig(OfflineTrainConfig):
    """The optimizer, its batches, the length of the run, the load of experts, and the evaluation."""
    generate_max_len: int = option(512, "longest judgement of an evaluation, in tokens", within=COUNT, free=True,
                                   common=True)


@dataclass
class GRMConfig(OfflineConfig):
    """The whole option tree of ``lightrft.cli.train_grm``."""
    data: JudgeDataConfig = group(JudgeDataConfig)
    train: JudgeTrainConfig = group(JudgeTrainConfig)

    PREFLIGHT = "lightrft.preflight.offline.GRMPreflight"
    SYNONYMS = _LIGHTRFT
    METRICS = ("grm", "eval")
    ROWS = "judgements"
