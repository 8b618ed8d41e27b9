"""Actors made from a path, ``ActorLanguage(PATH)``, with the arguments of LightRFT's constructor."""
from typing import Any

from lightrft.config.compat import REFUSED
from lightrft.config.options import ConfigError
from lightrft.config.schema import ModelConfig
from lightrft.config.tree import group_options
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.freezing import freeze
from lightrft.models.liger import apply_liger
from lightrft.models.loader import load_actor
from lightrft.models.recomputation import recompute
from lightrft.utils.errors import did_you_mean, UserError

# arguments that ask for what always holds, or for what the options of the run say
_GRANTED = ("use_flash_attention_2", "bf16", "ds_config", "device_map", "packing_samples", "temperature",
            "disable_logprobs_flashattn", "fused_linear_logprob", "high_entropy_token_ratio")
_ADAPTERS = ("lora_rank", "lora_alpha", "lora_dropout", "target_modules")


def load_at(path: str, arguments: dict[str, Any]) -> ActorLanguage:
    """Load the policy at ``path`` for :class:`ActorLanguage`, whose other ``arguments`` these are.

    Raises:
        ConfigError: an argument that is unknown, or that asks for what is not here.
    """
    known = group_options(ModelConfig)
    values: dict[str, Any] = {"pretrain": path}
    for name, value in arguments.items():
        if name in known and name not in _GRANTED:
            values |= {} if value is None else {name: known[name].convert(value)}
        elif value and name in REFUSED:
            raise ConfigError(f"{name}={value!r}: {REFUSED[name]}")
        elif name not in _GRANTED and name not in REFUSED:
            raise ConfigError(f"unknown argument {name} of an actor{did_you_mean(name, known)}")
    actor = load_actor(ModelConfig(**values))
    actor.made_with = values
    return actor


def adapters_of(actor: ActorLanguage) -> dict[str, Any]:
    """Return the options of the LoRA adapters that ``actor`` was made with."""
    return {name: value for name, value in actor.made_with.items() if name in _ADAPTERS}


def finish(actor: ActorLanguage, cfg: ModelConfig) -> None:
    """Give ``actor`` what the options of the run ask for, beside that which it was made with.

    Raises:
        UserError: LoRA, which only its construction can add.
    """
    if cfg.lora_rank and not actor.made_with.get("lora_rank"):
        raise UserError(f"--lora_rank {cfg.lora_rank}: the actor was made without it. Remedy: "
                        "ActorLanguage(PATH, lora_rank=args.lora_rank, lora_alpha=args.lora_alpha, ...)")
    if cfg.use_liger and not actor.made_with.get("use_liger"):
        apply_liger(actor.hf_model)
    freeze(actor.model, cfg.freeze_prefix, actor.modality)
    recompute(actor.hf_model, cfg)
    actor.fused_logprobs = actor.fused_logprobs or cfg.fused_logprobs
