"""Differences between model families and modalities: the class that loads them, the positions of tokens, the body and
the head. Everything else in ``models`` is the same for all."""
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lightrft.models.attention import PackedLayout
from lightrft.ops.segment import position_ids
from lightrft.types import Experience
from lightrft.utils.errors import UserError

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
TOWERS = ("vision_config", "audio_config", "speech_config", "dit_config")
SINKS = {"gpt_oss"}
SCALED_HEADS = ("lm_head_multiplier", "mup_width_scale", "output_multiplier")


@dataclass(frozen=True)
class Head:
    """The output layer: raw = scale * hidden @ weight.T + bias; logits = soft_cap * tanh(raw / soft_cap), 0: raw."""
    weight: Tensor
    bias: Tensor | None
    scale: float
    soft_cap: float


class ActorModality:
    """Text modality, and the base class of all others."""
    name = "text"
    auto_class: Any = AutoModelForCausalLM

    def inputs(self, exp: Experience) -> dict[str, Any]:
        """Keyword arguments of one packed forward of the decoder body."""
        if exp.media and any(exp.media):
            raise UserError("these samples carry images, video or audio, and the model takes text only")
        layout = PackedLayout.build(exp.cu_seqlens, exp.lens)
        positions = position_ids(exp.cu_seqlens, exp.num_tokens)
        return {
            "input_ids": exp.token_ids[None], "position_ids": positions[None], "attention_mask": None, "use_cache":
            False, "packing": layout
        }

    def body(self, hf: PreTrainedModel) -> nn.Module:
        """The decoder without its head: its output has ``last_hidden_state`` [1, T, H]."""
        return hf.get_decoder()

    def head(self, hf: PreTrainedModel) -> Head:
        """The head, read again on every forward because sharding swaps parameters."""
        layer, config = hf.get_output_embeddings(), hf.config
        scale = float(_value(config, "logit_scale", 1.0)) / float(_value(config, "logits_scaling",
                                                                         1.0))  # Cohere; Granite
        return Head(layer.weight, getattr(layer, "bias", None), scale,
                    float(_value(config, "final_logit_softcapping", 0.0)))


def _value(source: PretrainedConfig, key: str, default: Any) -> Any:
    """Entry ``key`` of a Hugging Face config, or ``default``; families omit, or set to None, what they do not have."""
    value = getattr(source, key, None)
    return default if value is None else value


def modality_of(config: PretrainedConfig, path: str) -> ActorModality:
    """The modality of a checkpoint.

    Raises:
        ValueError: the config is not a causal language model that packed attention can run (with the remedy).
    """
    reason = _refusal(config)
    if reason:
        raise UserError(f"model path {path!r} is of a wrong architecture: model type {config.model_type!r} {reason}")
    return ActorModality()


def _refusal(config: PretrainedConfig) -> str:
    remedy = "; give a decoder-only causal language model (Qwen2, Qwen3, Llama, Mistral, Gemma, ...)"
    layers = set(_value(config, "layer_types", [])) - ATTENTION_LAYERS
    if config.is_encoder_decoder:
        return "is an encoder-decoder" + remedy
    if any(_value(config, tower, None) for tower in TOWERS):
        return "has a vision or audio tower, and only text models are supported" + remedy
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or _value(config, "use_bidirectional_attention",
                                                                            False):
        return "is not a causal language model" + remedy
    if config.architectures and all(name.endswith("ForMaskedLM") for name in config.architectures):
        return f"was saved as {config.architectures[0]}, an encoder" + remedy
    if config.model_type in SINKS:
        return "uses attention sinks, which packed attention does not have" + remedy
    if layers:
        return f"has {', '.join(sorted(layers))} layers, which would mix packed sequences" + remedy
    if any(_value(config, key, 1.0) != 1.0 for key in SCALED_HEADS):
        return "scales its logits in a way that the fused log-probs do not know" + remedy
    return ""


def check_class(hf: PreTrainedModel, path: str) -> None:
    """Refuse a loaded model whose attention does not go through ``AttentionInterface`` or which is recurrent."""
    if not hf._can_set_attn_implementation() or hf._is_stateful:
        raise UserError(
            f"model path {path!r} is of a wrong architecture: the attention of {type(hf).__name__} cannot be replaced "
            "by packed attention (it does not use Hugging Face's AttentionInterface)")
