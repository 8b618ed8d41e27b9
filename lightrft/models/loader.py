"""Loads actors, critics and reward models from a Hugging Face folder or hub id; every error names a remedy."""
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForSequenceClassification, logging as hf_logging, PretrainedConfig, PreTrainedModel

from lightrft.config.rm_schema import RewardModelConfig, StepFormat
from lightrft.config.schema import ModelConfig
from lightrft.config.shared_schema import LogprobModelConfig, PolicyModelConfig
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.actor_modality import ActorModality
from lightrft.models.architectures import check_class, modality_of
from lightrft.models.config_json import read_config, required
from lightrft.models.cpu_layers import use_cpu_norms, use_onednn
from lightrft.models.freezing import freeze
from lightrft.models.generation_config import replacement
from lightrft.models.liger import apply_liger
from lightrft.models.lora import add_lora
from lightrft.models.packed_model import Critic, critic_class, PackedModel
from lightrft.models.recomputation import recompute
from lightrft.models.reward_model import (check_critic, check_language, cut_layers, ProcessRewardModel, reward_class,
                                          RewardHead, RewardModel)
from lightrft.models.weight_files import (name_as_published, Place, shapes_alone, stand_ins, StandIns, WeightFiles)
from lightrft.utils.errors import first_line, UserError
from lightrft.utils.env import total_memory
from lightrft.utils.hub import model_folder, read_pretrained
from lightrft.utils.tensors import to_meta

Model = TypeVar("Model", bound=PackedModel)


def load_actor(cfg: PolicyModelConfig, path: str | None = None, train: bool = True, dtype: torch.dtype = torch.float32,
               deferred: bool = False) -> ActorLanguage:
    """Load the policy at ``path`` (default ``cfg.pretrain``), with LoRA, frozen parts and checkpointing of ``cfg``.

    Dropout is off (also in training mode, LoRA dropout excepted), so that log-probs do not depend on who computes them.

    Args:
        train: False gives a frozen model without LoRA (a reference).
        dtype: of the weights; they are the master weights, so float32 for what is trained.
        deferred: leave the weights in their files, where they are stored as the model has them (see
            :class:`~lightrft.models.weight_files.WeightFiles`); the strategy then reads this rank's part.

    Raises:
        ValueError: the path, the architecture, the weights or an option do not fit; the message says which.
    """
    path = required(path or cfg.pretrain, "--pretrain")
    loaded, modality = _causal(path, read_config(path), dtype, deferred)
    actor = ActorLanguage(_finish(loaded.hf, cfg, train, modality), _chunk_mib(cfg), modality)
    actor.fused_logprobs = isinstance(cfg, LogprobModelConfig) and cfg.fused_logprobs
    return _defer(actor, loaded)


def load_process_reward_model(cfg: PolicyModelConfig, form: StepFormat, classes: list[int], train: bool = True,
                              deferred: bool = False) -> ProcessRewardModel:
    """Load the causal language model at ``cfg.pretrain`` to judge steps in the format ``form``.

    Args:
        classes: ids of the reward tokens.
        train, deferred: as in :func:`load_actor`.
    """
    path = required(cfg.pretrain, "--pretrain")
    loaded, modality = _causal(path, read_config(path), torch.float32, deferred)
    model = _finish(loaded.hf, cfg, train, modality)
    return _defer(ProcessRewardModel(model, form, classes, _chunk_mib(cfg), modality), loaded)


def load_critic(cfg: ModelConfig, path: str | None = None, train: bool = True, dtype: torch.dtype = torch.float32,
                deferred: bool = False) -> Critic:
    """Load the value function from ``path`` (default ``cfg.critic_pretrain``, then ``cfg.pretrain``).

    A checkpoint without a value head gets one of zeros, so that all values start at exactly 0. LoRA and
    ``freeze_prefix`` belong to the actor.
    """
    path = required(path or cfg.critic_pretrain or cfg.pretrain, "--critic_pretrain")
    config = read_config(path)
    modality = modality_of(config, path)
    check_critic(config, path)
    config.num_labels = 1
    loaded = _weights(critic_class(modality, config), path, config, dtype, ("score.weight", ), deferred,
                      attn_implementation=modality.attention(config),
                      key_mapping={f"^{re.escape(cfg.value_head_prefix)}\\.": "score."})
    hf: Any = loaded.hf  # its head is ``score``
    RewardHead(prefix=cfg.value_head_prefix).check_new(loaded.missing, loaded.unread, path)
    if loaded.missing:
        nn.init.zeros_(hf.score.weight)
    hf.generation_config = None  # exports ask every model for it; a critic generates nothing
    return _defer(Critic(_finish(hf, cfg, train), cfg.value_head_prefix, modality), loaded)


def load_reward_model(cfg: RewardModelConfig, deferred: bool = False) -> RewardModel:
    """Load the model at ``cfg.pretrain`` to train as a reward model, with LoRA and frozen parts of ``cfg``.

    A model without a head gets one of zeros; all rewards start at 0. One with a head keeps it.
    """
    path = required(cfg.pretrain, "--pretrain")
    config = read_config(path)
    cut_layers(config, cfg.probing_layer)
    head = RewardHead(cfg.heads_types, cfg.pooling_method, cfg.value_head_prefix)
    head.check_continues(config, path)
    loaded, modality = _reward_weights(path, config, head, torch.float32, head.new, deferred)
    hf: Any = loaded.hf
    head.check_new(loaded.missing, loaded.unread, path)
    for name in loaded.missing:
        nn.init.zeros_(hf.get_parameter(name))
    return _defer(RewardModel(_finish(hf, cfg, True, modality), head, modality, cfg.scale_for_train), loaded)


def load_scorer(path: str, dtype: torch.dtype = torch.float32, deferred: bool = False,
                prefix: str | None = None) -> RewardModel:
    """Load a trained reward model, or a sequence classifier of Hugging Face with one score, frozen.

    Args:
        prefix: name of the head in the files, where the folder does not tell it.

    Raises:
        UserError: it has no head, or none of this name.
    """
    config = read_config(path)
    head = RewardHead.of(config, path, prefix)
    loaded, modality = _reward_weights(path, config, head, dtype, ("score.weight", ), deferred)
    head.check_read(loaded.missing, loaded.unread, path)
    return _defer(RewardModel(_finish(loaded.hf, RewardModelConfig(), False), head, modality), loaded)


def load_exported(path: str, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """Load the model at ``path`` as Hugging Face does, for other uses than training; ``auto``: in the dtype of its
    files."""
    config = read_config(path)
    scores = (config.architectures or [""])[0].endswith("ForSequenceClassification")
    family = AutoModelForSequenceClassification if scores else modality_of(config, path).auto_class
    part = {"config": config} if config.model_type == "qwen2_5_omni_thinker" else {}  # perhaps of a whole model
    return name_as_published(
        read_pretrained(family,
                        model_folder(path) or path, dtype=dtype, **part, **replacement(path)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and its report of tensors (what matters in it is raised here)."""
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()


@dataclass
class _Loaded:
    """A model, the names of its tensors that no file has, those of the files that it does not read, and, where
    ``places`` are known, tensors that stand in for those in the files."""
    hf: PreTrainedModel
    missing: set[str]
    unread: set[str]
    stand_ins: StandIns | None = None
    places: dict[str, Place] | None = None


def _weights(auto_class: Any, path: str, config: PretrainedConfig, dtype: torch.dtype, new: tuple[str, ...],
             deferred: bool, **kwargs: Any) -> _Loaded:
    """Load the model with its weights, or with stand-ins for those that can be read from their files as they are.

    Where the default device is "meta", as in a plan, only names and shapes are read.
    """
    load = partial(_from_pretrained, auto_class, path, config, dtype, new, **kwargs)
    if "quantization_config" in config.to_dict():
        return load()
    if torch.get_default_device().type == "meta":
        with shapes_alone(dtype):
            return load(device_map={"": "meta"})
    if not deferred:
        return load()
    random = torch.get_rng_state()
    with stand_ins(dtype) as made:
        loaded = load()
    if not made.made:  # no safetensors: these are the weights
        return loaded
    places = made.places(loaded.hf, loaded.missing)
    if places is not None:
        return replace(loaded, stand_ins=made, places=places)
    torch.set_rng_state(random)
    del loaded
    return load()


def _from_pretrained(auto_class: Any, path: str, config: PretrainedConfig, dtype: torch.dtype, new: tuple[str, ...],
                     **kwargs: Any) -> _Loaded:
    """Load the model with its weights; only the parameters ``new`` may be missing."""
    try:
        with _quiet():
            hf, info = read_pretrained(auto_class,
                                       model_folder(path) or path, config=config,
                                       dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True,
                                       **replacement(path), **kwargs)  # they raise below, with their names
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise UserError(f"cannot load the weights of {path!r}: {first_line(error)}") from error
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        raise UserError(f"cannot load the weights of {path!r}: {name} is stored as {' x '.join(map(str, stored))}, and "
                        f"{type(hf).__name__} has {' x '.join(map(str, wanted))} here; config.json or the options "
                        "describe another model")
    missing = sorted(set(info["missing_keys"]) - set(new))
    if missing:
        raise UserError(
            f"the checkpoint {path!r} lacks {len(missing)} tensors of {type(hf).__name__}, first {missing[0]!r}")
    check_class(hf, path)
    return _Loaded(hf, set(info["missing_keys"]), set(info["unexpected_keys"]))


def _causal(path: str, config: PretrainedConfig, dtype: torch.dtype, deferred: bool) -> tuple[_Loaded, ActorModality]:
    """Load a causal language model with its modality."""
    check_language(config, set(), path)
    modality = modality_of(config, path)
    loaded = _weights(modality.auto_class, path, config, dtype, (), deferred,
                      attn_implementation=modality.attention(config))
    check_language(config, loaded.unread, path)
    return loaded, modality


def _chunk_mib(cfg: PolicyModelConfig) -> int:
    return cfg.chunk_mib(total_memory(torch.device("cuda")) if torch.cuda.is_available() else 0)


def _reward_weights(path: str, config: PretrainedConfig, head: RewardHead, dtype: torch.dtype, new: tuple[str, ...],
                    deferred: bool) -> tuple[_Loaded, ActorModality]:
    """Load the decoder with its head, and describe the head in its config."""
    modality = modality_of(config, path)
    head.write(config)
    loaded = _weights(reward_class(modality, config, head.pooling), path, config, dtype, new, deferred,
                      attn_implementation=modality.attention(config),
                      key_mapping={f"^{re.escape(head.prefix)}\\.": "score."})
    hf: Any = loaded.hf
    hf.generation_config = None  # as of critics
    return loaded, modality


def _defer(model: Model, loaded: _Loaded) -> Model:
    """Put the tensors of ``model`` that are stood in for on the meta device, to be read from their files later."""
    if loaded.stand_ins is not None and loaded.places is not None:
        to_meta(model, loaded.stand_ins.stands_in)
        model.files = WeightFiles(loaded.places)
    return model


# -- how it is held ---------------------------------------------------------------------------------------------------
def _finish(hf: PreTrainedModel, cfg: PolicyModelConfig, train: bool,
            modality: ActorModality | None = None) -> nn.Module:
    """Apply the options of ``cfg`` to a model; LoRA and frozen parts to a policy, whose ``modality`` is given."""
    name_as_published(hf)
    if cfg.use_liger:
        apply_liger(hf)
    use_onednn(hf)
    use_cpu_norms(hf)
    if not train:
        return hf.requires_grad_(False).eval()
    model: nn.Module = hf
    if modality and cfg.lora_rank > 0:
        model = add_lora(hf, cfg.lora_rank, cfg.lora_alpha, cfg.lora_dropout, cfg.target_modules, modality)
    if modality:
        freeze(model, cfg.freeze_prefix, modality)
    recompute(hf, cfg)
    return model.train()
