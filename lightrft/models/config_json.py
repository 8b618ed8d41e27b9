"""Reads the config.json of a model, in a folder or on the hub: its parts, shapes and lengths, without weights."""
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from lightrft.models.activations import ModelShape
from lightrft.models.actor_modality import ActorModality, MediaModality
from lightrft.models.adapter_folder import refuse_adapter, refuse_hub_adapter
from lightrft.models.architectures import modality_of
from lightrft.models.freezing import frozen_names
from lightrft.models.reward_model import RewardKind
from lightrft.models.towers import Tower
from lightrft.utils.errors import first_line, UserError
from lightrft.utils.hub import model_folder, read_object, read_pretrained


def read_config(path: str) -> PretrainedConfig:
    """Read the config.json of the model at ``path``, without dropout; of Qwen2.5-Omni that of its thinker."""
    folder = model_folder(path)
    refuse_adapter(path, folder)
    if folder is not None and not (folder / "config.json").is_file():
        inside = sorted(other.parent for other in folder.glob("*/config.json"))
        found = [f"Give {one}, the model of this run" for one in inside if one.name == "hf"]
        found += [f"Give {one}, which has one" for one in inside]
        raise UserError(f"model path {path!r} has no config.json, so it is no Hugging Face model folder. " +
                        [*found, "lightrft export writes one from a checkpoint"][0])
    try:
        config = read_pretrained(AutoConfig, path) if folder is None else deepcopy(
            _parsed(folder, (folder / "config.json").read_bytes()))
    except (OSError, ValueError, KeyError) as error:
        if folder is None:
            with suppress(OSError):  # the first error says more
                refuse_hub_adapter(path, whole=False)
        where = "" if folder else " (no such folder, so it was taken for a hub id)"
        raise UserError(f"cannot load a model from {path!r}{where}: {first_line(error)}") from error
    if folder is None:
        refuse_hub_adapter(path)
    if config.model_type == "qwen2_5_omni":  # its talker and its vocoder, which speak, stay out
        config = config.thinker_config
        config.name_or_path = str(folder or path)
    for part in (config, *(vars(config).get(name) for name in config.sub_configs)):
        for key, value in vars(part).items() if part is not None else ():
            if "drop" in key and isinstance(value, float) and value:
                setattr(part, key, 0.0)
    return config


@lru_cache(maxsize=8)  # a run reads the same file about ten times; with media, each takes 20 ms
def _parsed(folder: Path, content: bytes) -> PretrainedConfig:
    read_object(folder / "config.json")
    return read_pretrained(AutoConfig, folder)


def reward_kind(path: str) -> RewardKind:
    """Read the kind of the reward model at ``path`` from its config.json, and the names in its weight files."""
    return RewardKind.of(read_config(path), path)


def parameter_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of the model at ``path``, from its config.json alone; tied ones come once.

    Raises:
        ValueError: the path or the architecture does not fit.
    """
    return {name: tuple(parameter.shape) for name, parameter in _without_data(path)[0].named_parameters()}


def trained_share(path: str, words: list[str]) -> tuple[float, bool]:
    """Return the share of the parameters of the model at ``path`` that ``--freeze_prefix`` leaves to train, and whether
    its head is among them, from its config.json alone.

    Raises:
        ValueError: also of :func:`~lightrft.models.freezing.frozen_names`.
    """
    hf, modality = _without_data(path)
    named = dict(hf.named_parameters())
    frozen, head = frozen_names(hf, list(named), words, modality), hf.get_output_embeddings().weight
    counts = {name: parameter.numel() for name, parameter in named.items()}
    left = sum(count for name, count in counts.items() if name not in frozen)
    return left / sum(counts.values()), not any(named[name] is head for name in frozen)


def _without_data(path: str) -> tuple[PreTrainedModel, ActorModality]:
    config = read_config(path)
    modality = modality_of(config, path)
    with torch.device("meta"):
        return modality.auto_class.from_config(config, trust_remote_code=False), modality


def takes_media(path: str) -> bool:
    """Return True if the model at ``path`` takes media, from its config.json alone."""
    return bool(media_kinds(path))


def media_kinds(path: str) -> tuple[str, ...]:
    """Kinds of media that the model at ``path`` takes, from its config.json alone."""
    return tuple(_towers(path))


def token_frames(path: str) -> int:
    """Return :attr:`Tower.token_frames <lightrft.models.towers.Tower.token_frames>` of the model at ``path``."""
    return max((tower.token_frames for tower in _towers(path).values()), default=0)


def _towers(path: str) -> dict[str, Tower]:
    modality = modality_of(read_config(path), path)
    return modality.family.towers if isinstance(modality, MediaModality) else {}


def model_shape(path: str) -> ModelShape | None:
    """The widths of the model at ``path``, from its config.json alone; None if that does not have the usual names."""
    return ModelShape.of(read_config(path))


def check_context(path: str | None, **lens: int) -> None:
    """Refuse options whose lengths add up to more tokens than the model at ``path`` has positions for.

    Args:
        lens: tokens by the name of their option, e.g. ``prompt_max_len=1024, generate_max_len=1024``.

    Raises:
        ValueError: naming the lengths, the context and the remedy; also an unusable path.
    """
    path = required(path, "--pretrain")
    check_positions(path, context_of(path), lens)


def check_positions(path: str, context: int, lens: dict[str, int]) -> None:
    """Refuse lengths that add up to more than ``context`` tokens, as :func:`check_context` does; 0: it is unknown."""
    total = sum(lens.values())
    if context and total > context:
        options = [f"--{name} {value}" for name, value in lens.items()]
        are = f"{' + '.join(options)} = {total} tokens are" if len(lens) > 1 else f"{options[0]} is"
        raise UserError(f"{are} more than the {context} positions of {path!r} (max_position_embeddings). Lower "
                        f"{' or '.join(f'--{name}' for name in lens)}, or use a model with a longer context")


def logit_count(path: str) -> int:
    """Number of logits of the model at ``path``; families pad it beyond the tokens of their tokenizer."""
    return int(read_config(path).get_text_config().vocab_size)


def context_of(path: str) -> int:
    """Tokens that the model at ``path`` has positions for, extended by RoPE scaling; 0: its config does not say."""
    config = read_config(path)
    values = config.get_text_config().to_dict()
    known = values.get("max_position_embeddings")
    if not isinstance(known, int) or known <= 0:
        return 0
    rope = values.get("rope_parameters") or {}
    scaled = [
        float(part["factor"]) * (part.get("original_max_position_embeddings") or known)
        for part in (rope, *rope.values()) if isinstance(part, dict) and part.get("factor")
    ]
    return max(known, *map(int, scaled)) if scaled else known


def required(path: str | None, flag: str) -> str:
    """Return the ``path`` of a model; an error that names ``flag`` if there is none."""
    if not path:
        raise UserError(f"no model given: set {flag} to a Hugging Face folder or hub id")
    return path
