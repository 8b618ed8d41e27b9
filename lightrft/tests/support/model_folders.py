"""Tiny models in every form of files that a loader meets."""
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3MoeConfig

from lightrft.tests.support import tiny

EXPERTS = Qwen3MoeConfig(vocab_size=65, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
                         moe_intermediate_size=24, intermediate_size=48)


def write(home: Path) -> None:
    """Write a model per folder of ``home``."""
    tiny.save_model(home / "one_file")
    parts = tiny.model("llama").to(torch.bfloat16)
    parts.save_pretrained(home / "parts_bf16", max_shard_size="20KB")
    AutoModelForCausalLM.from_config(EXPERTS).save_pretrained(home / "experts")  # one tensor per expert
    weights = load_file(tiny.save_model(home / "pickled") / "model.safetensors")
    torch.save(weights, home / "pickled" / "pytorch_model.bin")
    (home / "pickled" / "model.safetensors").unlink()
    for name, head in (("tied_twice", weights["model.embed_tokens.weight"].clone()),
                       ("untied", 2 * weights["model.embed_tokens.weight"])):
        file = tiny.save_model(home / name) / "model.safetensors"
        save_file(weights | {"lm_head.weight": head}, file, {"format": "pt"})
    _write_critic(home / "critic")
    tiny.model(hidden_size=256, intermediate_size=512,
               num_hidden_layers=4).to(torch.bfloat16).save_pretrained(home / "larger")


def _write_critic(folder: Path) -> None:
    """Write a critic whose head is called ``head``."""
    tiny.save_model(folder)
    critic = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    named = {name.replace("score.", "head."): value.detach().clone() for name, value in critic.named_parameters()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
