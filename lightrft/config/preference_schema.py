"""Options of preference training against a reference model: pairs (DPO and related losses), single answers (KTO)."""
from dataclasses import dataclass

from lightrft.config.offline_schema import OfflineConfig, OfflineDataConfig, OfflineTrainConfig, PairConfig
from lightrft.config.options import NON_NEGATIVE, option, POSITIVE
from lightrft.config.shared_schema import PolicyModelConfig
from lightrft.config.tree import group

PAIR_LOSSES = ("sigmoid", "ipo_sum", "ipo_mean", "hinge", "robust", "simpo", "orpo", "apo_zero", "apo_down", "sppo",
               "aot", "exo")
WITHOUT_REFERENCE = ("simpo", "orpo")


@dataclass
class ReferenceModelConfig(PolicyModelConfig):
    """The trained model and its reference: weights, precision and adapters."""
    ref_pretrain: str | None = option(
        None, "HF folder or hub id of the reference model (default: a copy of --pretrain; with "
        "LoRA the policy without its adapters, without a copy)", path="model")
    ref_offload: bool = option(False, "keep the reference in host memory except while it computes", free=True)
    ref_cache_dir: str | None = option(
        None, "cache folder for log-probs of the reference: computed once before the first step, then the reference is "
        "freed; later runs on the same model and data reuse them", free=True)


@dataclass
class PreferenceConfig:
    """The loss of a pair."""
    loss: str = option("sigmoid", "loss of a pair (sigmoid: DPO); see the table of losses", PAIR_LOSSES, common=True)
    ipo: bool = option(False, "OpenRLHF's flag for --loss ipo_sum")
    beta: float = option(
        0.1, "strength of the pull towards the reference (tau of IPO, 1 / eta of SPPO), or of the "
        "loss without one (lambda of ORPO; SimPO uses about 2)", within=POSITIVE, common=True)
    label_smoothing: float = option(
        0.0, "assumed share of pairs with wrong labels: sigmoid (conservative DPO), robust, "
        "simpo, aot, exo", within="[0, 0.5]")
    simpo_gamma: float = option(0.5, "reward margin of --loss simpo", within=NON_NEGATIVE)
    nll_loss_coef: float = option(0.0, "weight of the chosen answer's NLL per token, added to the loss of the pair",
                                  within=NON_NEGATIVE)
    nll_token_mean: bool = option(
        False, "average that NLL over the tokens of all chosen answers of a batch, as TRL does (its rpo_alpha); off: "
        "per answer, then over the pairs", needs="nll_loss_coef 0.1")

    @property
    def chosen_loss(self) -> str:
        """The loss that ``loss`` and ``ipo`` ask for."""
        return "ipo_sum" if self.ipo else self.loss

    @property
    def needs_reference(self) -> bool:
        """True if the loss reads log-probs of a reference model."""
        return self.chosen_loss not in WITHOUT_REFERENCE


@dataclass
class DPOTrainConfig(OfflineTrainConfig):
    """The optimizer, its batches, the length of the run, and the load of experts."""
    learning_rate: float = option(5e-7, "peak learning rate", within=NON_NEGATIVE, common=True, card="learning rate")


@dataclass
class DPOConfig(PairConfig):
    """The whole option tree of ``lightrft.cli.train_dpo``."""
    model: ReferenceModelConfig = group(ReferenceModelConfig)
    preference: PreferenceConfig = group(PreferenceConfig)
    train: DPOTrainConfig = group(DPOTrainConfig)

    PREFLIGHT = "lightrft.preflight.offline.DPOPreflight"
    SYNONYMS = dict.fromkeys(("rpo_alpha", "cpo_alpha"), "nll_token_mean nll_loss_coef")
    TRAINING = "training on pairs of answers"
    METRICS = ("dpo", "eval")


@dataclass
class JudgedDataConfig(OfflineDataConfig):
    """Answers that are good or bad, each on its own, and their rendering."""
    COLUMNS = ("input_key", )
    input_key: str = option("prompt", "column that holds the prompt (text or chat messages)", common=True)
    output_key: str | None = option(
        None, "column that holds the answer (default: completion, response, output, answer or solution, the first that "
        "a row has)", common=True)
    label_key: str = option("label", "column that says if the answer is desirable: true or false, 1 or 0", common=True)


@dataclass
class JudgedConfig:
    """The loss of an answer."""
    beta: float = option(0.1, "strength of the pull towards the reference", within=POSITIVE, common=True)
    desirable_loss_weight: float = option(1.0, "weight of the loss of desirable answers", within=NON_NEGATIVE)
    undesirable_loss_weight: float = option(1.0, "weight of the loss of undesirable answers", within=NON_NEGATIVE)


@dataclass
class KTOConfig(OfflineConfig):
    """The whole option tree of ``lightrft.cli.train_kto``."""
    model: ReferenceModelConfig = group(ReferenceModelConfig)
    data: JudgedDataConfig = group(JudgedDataConfig)
    preference: JudgedConfig = group(JudgedConfig)
    train: DPOTrainConfig = group(DPOTrainConfig)

    PREFLIGHT = "lightrft.preflight.offline.KTOPreflight"
    SYNONYMS = {
        "desirable_weight": "desirable_loss_weight",
        "undesirable_weight": "undesirable_loss_weight",
    }
    TRAINING = "training on judged answers"
    METRICS = ("kto", "eval")
    ROWS = "judged answers"
