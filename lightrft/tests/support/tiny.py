"""Tiny random models and a character tokenizer, built through the public Hugging Face classes, for every test."""
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen2Tokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")

_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
# model type and what differs from _SIZES; every family with a window uses 8 tokens, so that short tests cross it
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 8}),
    "gemma2": ("gemma2", {"sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {"sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8}),
}
_DELTA = {"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}  # yapf: disable
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32}  # yapf: disable
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {  # a layer with state, then one of attention
    "qwen3_5": ("qwen3_5_text", _DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", _DELTA | _EXPERTS),
    "qwen3_next": ("qwen3_next", _DELTA | _EXPERTS),
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 8, "mamba_chunk_size": 16,
          "mamba_n_groups": 1}  # yapf: disable
STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {  # other layers with state: one of each kind
    "bamba": ("bamba", _MAMBA | {"attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
                                "mamba_chunk_size": 16, "head_dim": 8, "lm_head_multiplier": 0.5,
                                "ssm_multipliers": [0.7, 0.5, 0.6, 1.5, 0.8]}),
    "granitemoehybrid": ("granitemoehybrid", _MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 32,
                                                       "layer_types": ["mamba", "attention"]}),
    "jamba": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 8}),
    "kimi_linear": ("kimi_linear", {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 2, "linear_head_dim": 16,
        "num_key_value_heads": 4, "mlp_layer_types": ["dense", "dense"], "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]}),
    "minimax": ("minimax", {"layer_types": ["linear_attention", "full_attention"], "block_size": 16, "head_dim": 8,
                            "num_local_experts": 2}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["mamba", "mlp", "attention"], "mamba_num_heads": 4,
                                  "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 16, "n_groups": 1,
                                  "head_dim": 8, "num_hidden_layers": 3}),
    "olmo_hybrid": ("olmo_hybrid", _DELTA),
    "zamba2": ("zamba2", {"mamba_d_state": 8, "mamba_expand": 2, "n_mamba_heads": 4, "mamba_headdim": 16,
                          "mamba_ngroups": 1, "chunk_size": 16, "num_hidden_layers": 3, "initializer_range": 0.15,
                          "layers_block_type": ["mamba", "hybrid", "hybrid"]}),  # which share a block
}  # yapf: disable
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {  # a token takes two of four experts
    "mixtral": ("mixtral", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
}

LATENT: dict[str, tuple[str, dict[str, Any]]] = {  # attention whose values are narrower, or wider, than its keys
    "deepseek_v3": ("deepseek_v3", {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 8, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1}),
    "minicpm3": ("minicpm3", {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
        "v_head_dim": 16}),
}  # yapf: disable

TWICE: dict[str, tuple[str, dict[str, Any]]] = {"diffllama": ("diffllama", {})}  # attends twice under one index


def tokenizer(**marks: str) -> PreTrainedTokenizerBase:
    """One token per byte and four special tokens, with eos, pad and a ChatML template; then ``marks``, more special
    tokens by name.

    It is a byte-level BPE without merges in Qwen2's public class, because ``AutoTokenizer`` forces that class on every
    folder that holds a qwen2 model.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + letters)}
    return Qwen2Tokenizer(vocab=vocab, merges=[], pad_token="<pad>", unk_token="<unk>", eos_token="<|im_end|>",
                          additional_special_tokens=["<|im_start|>"], chat_template=CHATML,
                          model_specific_special_tokens=marks)


def config(family: str = "qwen2", **overrides: Any) -> Any:
    """The configuration of a tiny model of ``family`` (a key of ``FAMILIES``, ``HYBRIDS`` or ``MIXTURES``)."""
    model_type, changes = (FAMILIES | HYBRIDS | STATEFUL | MIXTURES | LATENT | TWICE)[family]
    tok = tokenizer()
    ids = {
        "vocab_size": len(tok), "pad_token_id": tok.pad_token_id, "eos_token_id": tok.eos_token_id, "bos_token_id": None
    }
    return AutoConfig.for_model(model_type, **(_SIZES | ids | changes | overrides))


def model(family: str = "qwen2", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A float32 causal language model of ``family`` with random weights that depend on ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config(family, **overrides), dtype=torch.float32).eval()


def save_model(folder: Path | str, family: str = "qwen2", seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny model, its tokenizer and generation config to ``folder``, as a download would look; returns it."""
    path, tok = Path(folder), tokenizer()
    hf = model(family, seed, **overrides)
    hf.generation_config = GenerationConfig(eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id)
    hf.save_pretrained(path)
    tok.save_pretrained(path)
    return path


def change_json(file: Path, **changes: Any) -> None:
    """Set the keys ``changes`` in a JSON file of a saved model; those that are None disappear."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
