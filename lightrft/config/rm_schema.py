"""Options of reward models: their training, on pairs."""
from dataclasses import dataclass

from lightrft.config.offline_schema import OfflineTrainConfig, PairConfig
from lightrft.config.options import ANY, option
from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.config.tree import group


@dataclass
class RewardModelConfig(PolicyModelConfig):
    """The trained model, its reward head, precision and adapters."""
    value_head_prefix: str = option("score", "name of the reward head in checkpoints; Hugging Face knows it as score")
    heads_types: list[str] = option(["preference"], "names of the scores, one or several; the first one is the reward, "
                                    "others learn from the column 'heads' of a row")
    pooling_method: str = option(
        "last", "what the head reads: last, the hidden state of the last token; attn, a learnt average over all tokens "
        "(no sequence classifier of Hugging Face)", ("last", "attn"))
    probing_layer: int = option(
        -1,
        "decoder layer whose hidden states the head reads, after the final norm: 0 the embeddings, -1 the last one; "
        "later layers are cut off", within=ANY)
    scale_for_train: bool = option(
        False, "multiply scores in training, not in evaluation and use, by a learnt number per head that starts at "
        "1 / 0.07")


@dataclass
class RMTrainConfig(OfflineTrainConfig):
    """The loss, the optimizer, its batches and the length of the run."""
    loss: str = option(
        "sigmoid",
        "of rewards c and r of a pair: sigmoid -log sigmoid(c - r - margin), with the margin of the row; logexp "
        "log(1 + exp(r - c)); hps: cross-entropy of softmax(c, r). The last two are equal, and know no margin",
        ("sigmoid", "logexp", "hps"), common=True)


@dataclass
class RMConfig(PairConfig):
    """The whole option tree of ``lightrft.cli.train_rm``."""
    model: RewardModelConfig = group(RewardModelConfig)
    train: RMTrainConfig = group(RMTrainConfig)

    TRAINING = "training as a reward model"
    METRICS = ("rm", "eval")
