"""Architectures that can be trained: the modality of a config, and why others are refused."""
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightrft.models.actor_modality import ActorModality, FAMILIES, MediaModality
from lightrft.models.packing_check import packing_fault
from lightrft.models.stateful import KINDS, MIXES_NOTHING, stateful
from lightrft.models.towers import config_value, Family
from lightrft.utils.errors import UserError

REMEDY = "; give a decoder-only causal language model (Qwen2, Qwen3, Llama, Mistral, Gemma, ...)"
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
TOWERS = ("vision_config", "audio_config", "speech_config", "encoder_config", "dit_config")
REFUSED = {
    "audioflamingo3": "is loaded by no auto class of transformers for multimodal language models",
    "qwen3_omni_moe": "also generates speech, and the features of a sound depend on the other sounds of the batch",
    "qwen3_omni_moe_thinker": "has an audio tower whose features depend on the other sounds of the batch",
}


def modality_of(config: PretrainedConfig, path: str) -> ActorModality:
    """The modality of a checkpoint.

    Raises:
        ValueError: the config is not a causal language model that packed attention can run, or a small copy of it
            computes other log-probs for packed sequences (with the remedy).
    """
    family = FAMILIES.get(config.model_type)
    reason = _refusal(config, family)
    if not reason and (fault := packing_fault(config)):
        reason = fault + REMEDY
    if reason:
        raise UserError(f"model path {path!r} is of a wrong architecture: model type {config.model_type!r} {reason}")
    return ActorModality() if family is None else MediaModality(family, config)


def _refusal(config: PretrainedConfig, family: Family | None) -> str:
    """Say why a config is refused before a copy is tried: what the check cannot see, or what it says in worse words."""
    if config.model_type in REFUSED:
        return f"{REFUSED[config.model_type]}; give a model of one of {', '.join(FAMILIES)}"
    if config.is_encoder_decoder:
        return "is an encoder-decoder" + REMEDY
    text = config.get_text_config()
    layers = set(config_value(text, "layer_types", [])) - ATTENTION_LAYERS - KINDS - MIXES_NOTHING
    if family is None and any(config_value(config, tower, None) for tower in TOWERS):
        return f"has a vision or audio tower of a family that is not supported{REMEDY}, or one of {', '.join(FAMILIES)}"
    both_ways = config_value(text, "use_bidirectional_attention", False)
    if family is None and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or both_ways and not (
            both_ways == "vision" and family and family.blocks):
        return "is not a causal language model" + REMEDY
    if config.architectures and all(name.endswith("ForMaskedLM") for name in config.architectures):
        return f"was saved as {config.architectures[0]}, an encoder" + REMEDY
    if layers:
        return f"has {', '.join(sorted(layers))} layers, which would mix packed sequences" + REMEDY
    return ""


def check_class(hf: PreTrainedModel, path: str) -> None:
    """Refuse a loaded model whose attention is not replaceable, or which has a recurrence of its own."""
    kinds = config_value(hf.config.get_text_config(), "layer_types", None)
    recurs = hf._is_stateful and not stateful(hf) and (kinds is None or not ATTENTION_LAYERS.issuperset(kinds))
    if not hf._can_set_attn_implementation() or recurs:
        raise UserError(
            f"model path {path!r} is of a wrong architecture: the attention of {type(hf).__name__} cannot be replaced "
            "by packed attention (it does not use Hugging Face's AttentionInterface)")
