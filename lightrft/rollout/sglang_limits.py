"""What SGLang's attention would leave out, so that it would generate from another model than the one that trains."""
from transformers import PretrainedConfig

from lightrft.utils.errors import UserError

_REMEDY = "use --engine_type vllm or hf"


def check_cap(config: PretrainedConfig, attention_backend: str | None) -> None:
    """Refuse a model with capped attention logits (Gemma 2) where attention is torch's, as it is on a CPU."""
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if cap and attention_backend == "torch_native":
        raise UserError(f"SGLang's attention_backend torch_native, the one without kernels, does not cap attention "
                        f"logits, and this model does (attn_logit_softcapping {cap:g}); {_REMEDY}")


def check_window(config: PretrainedConfig, longest: int, known: int | None) -> None:
    """Refuse a model whose window is shorter than ``longest`` tokens where SGLang's, ``known``, is None."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"])
    if window and slides and window < longest and known is None:
        raise UserError(f"this model's attention reaches back {window} tokens (sliding_window), which SGLang does not "
                        f"do for {text.model_type}, and a prompt with its response may have {longest}; shorten "
                        f"--prompt_max_len or --generate_max_len, or {_REMEDY}")
