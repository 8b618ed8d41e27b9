"""Loading of tokenizers, actors and critics from a Hugging Face folder or hub id; every refusal says what to do.

Chat templates that a user can name are here too; ``generation`` marks the tokens that the assistant wrote.
"""
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from torch import nn
from transformers import (AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, logging as hf_logging,
                          PretrainedConfig, PreTrainedModel)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from lightrft.config.schema import ModelConfig
from lightrft.models.activations import ModelShape
from lightrft.models.actor_language import ActorLanguage
from lightrft.models.actor_modality import check_class, modality_of
from lightrft.models.attention import PACKED
from lightrft.models.cpu_linear import use_onednn
from lightrft.models.lora import add_lora, hf_name
from lightrft.models.packed_model import Critic, PackedModel
from lightrft.models.weight_files import Place, StandIns, stand_ins, WeightFiles
from lightrft.utils.errors import first_line, install_command, UserError
from lightrft.utils.env import total_memory
from lightrft.utils.logging import get_logger
from lightrft.utils.module_tensors import to_meta

Model = TypeVar("Model", bound=PackedModel)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(path: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``path``; a missing pad token becomes eos (packed batches never pad, only exports name it).

    Args:
        path: HF folder or hub id.
        chat_template: a Jinja file or a built-in name that replaces the tokenizer's own template.

    Raises:
        ValueError: no such folder, no tokenizer in it, no eos token, or an unknown or broken template.
    """
    folder = _folder(path)
    if folder is not None and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"{path!r} holds no tokenizer ({', '.join(_TOKENIZER_FILES)}); copy the model's tokenizer files there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder or path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot load the tokenizer of {path!r}: {first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {path!r} has no eos token, so responses could never end: set \"eos_token\" in its "
            "tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        get_logger().info(f"the tokenizer of {path} has no pad token: eos {tokenizer.eos_token!r} is used")
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
        _try_template(tokenizer, chat_template)
    return tokenizer


def _try_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except TemplateError as error:
        raise UserError(f"chat template {name!r} does not render: {first_line(error)}") from error


def load_actor(cfg: ModelConfig, path: str | None = None, train: bool = True, dtype: torch.dtype = torch.float32,
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
    path = _chosen(path or cfg.pretrain, "--pretrain")
    config = _config(path)
    modality = modality_of(config, path)
    loaded = _weights(modality.auto_class, path, config, dtype, (), deferred)
    model = _finish(loaded.hf, cfg, train, lora=True)
    gpu = torch.device("cuda") if torch.cuda.is_available() else None
    return _defer(ActorLanguage(model, cfg.chunk_mib(total_memory(gpu) if gpu else 0), modality), loaded)


def load_critic(cfg: ModelConfig, path: str | None = None, train: bool = True, dtype: torch.dtype = torch.float32,
                deferred: bool = False) -> Critic:
    """Load the value function from ``path`` (default ``cfg.critic_pretrain``, then ``cfg.pretrain``).

    A checkpoint without a value head gets one of zeros, so that all values start at exactly 0. LoRA and
    ``freeze_prefix`` belong to the actor.
    """
    path = _chosen(path or cfg.critic_pretrain or cfg.pretrain, "--critic_pretrain")
    config = _config(path)
    modality = modality_of(config, path)
    config.num_labels = 1
    loaded = _weights(AutoModelForSequenceClassification, path, config, dtype, ("score.weight", ), deferred,
                      key_mapping={f"^{cfg.value_head_prefix}\\.": "score."})
    hf: Any = loaded.hf  # its head is ``score``
    if loaded.missing:
        nn.init.zeros_(hf.score.weight)
    hf.generation_config = None  # exports ask every model for it; this class has none
    return _defer(Critic(_finish(hf, cfg, train, lora=False), cfg.value_head_prefix, modality), loaded)


def parameter_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of the model at ``path``, from its config.json alone; tied ones come once.

    Raises:
        ValueError: the path or the architecture does not fit.
    """
    config = _config(path)
    with torch.device("meta"):
        hf = modality_of(config, path).auto_class.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in hf.named_parameters()}


def model_shape(path: str) -> ModelShape | None:
    """The widths of the model at ``path``, from its config.json alone; None if that does not have the usual names."""
    return ModelShape.of(_config(path))


def check_context(path: str | None, **lens: int) -> None:
    """Refuse options whose lengths add up to more tokens than the model at ``path`` has positions for.

    Args:
        lens: tokens by the name of their option, e.g. ``prompt_max_len=1024, generate_max_len=1024``.

    Raises:
        ValueError: naming the lengths, the context and the remedy; also an unusable path.
    """
    path = _chosen(path, "--pretrain")
    context, total = _context(_config(path)), sum(lens.values())
    if context and total > context:
        options = [f"--{name} {value}" for name, value in lens.items()]
        are = f"{' + '.join(options)} = {total} tokens are" if len(lens) > 1 else f"{options[0]} is"
        raise UserError(f"{are} more than the {context} positions of {path!r} (max_position_embeddings). Lower "
                        f"{' or '.join(f'--{name}' for name in lens)}, or use a model with a longer context")


def _context(config: PretrainedConfig) -> int:
    """Tokens that the model has positions for, extended by RoPE scaling; 0: its config does not say."""
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


# -- where the model comes from ---------------------------------------------------------------------------------------
def _chosen(path: str | None, flag: str) -> str:
    if not path:
        raise UserError(f"no model given: set {flag} to a Hugging Face folder or hub id")
    return path


def _folder(path: str) -> Path | None:
    """The local folder ``path``; None for a hub id."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"model path {path!r} is a file; give the folder that holds config.json")
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(
            f"model path {path!r} does not exist; give a Hugging Face folder or a hub id such as Qwen/Qwen2.5-0.5B")
    return None


def _config(path: str) -> PretrainedConfig:
    folder = _folder(path)
    if folder is not None and not (folder / "config.json").is_file():
        raise UserError(f"model path {path!r} has no config.json, so it is no Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(folder or path)
    except (OSError, ValueError, KeyError) as error:
        where = "" if folder else " (no such folder here, so taken as a hub id)"
        raise UserError(f"cannot load a model from {path!r}{where}: {first_line(error)}") from error
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float) and value:
            setattr(config, key, 0.0)
    return config


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
    """A model, the names of its tensors that no file has, and, where ``places`` are known, tensors that stand in for
    those in the files."""
    hf: PreTrainedModel
    missing: set[str]
    stand_ins: StandIns | None = None
    places: dict[str, Place] | None = None


def _weights(auto_class: Any, path: str, config: PretrainedConfig, dtype: torch.dtype, new: tuple[str, ...],
             deferred: bool, **kwargs: Any) -> _Loaded:
    """Load the model with its weights, or with stand-ins for those that can be read from their files as they are."""
    load = partial(_from_pretrained, auto_class, path, config, dtype, new, **kwargs)
    if not deferred or "quantization_config" in config.to_dict():
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
            hf, info = auto_class.from_pretrained(
                _folder(path) or path, config=config, dtype=dtype, attn_implementation=PACKED, output_loading_info=True,
                **kwargs)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise UserError(f"cannot load the weights of {path!r}: {first_line(error)}") from error
    missing = sorted(set(info["missing_keys"]) - set(new))
    if missing:
        raise UserError(
            f"the checkpoint {path!r} lacks {len(missing)} tensors of {type(hf).__name__}, first {missing[0]!r}")
    check_class(hf, path)
    return _Loaded(hf, set(info["missing_keys"]))


def _defer(model: Model, loaded: _Loaded) -> Model:
    """Put the tensors of ``model`` that are stood in for on the meta device, to be read from their files later."""
    if loaded.stand_ins is not None and loaded.places is not None:
        to_meta(model, loaded.stand_ins.stands_in)
        model.files = WeightFiles(loaded.places)
    return model


# -- how it is held ---------------------------------------------------------------------------------------------------
def _finish(hf: PreTrainedModel, cfg: ModelConfig, train: bool, lora: bool) -> nn.Module:
    if cfg.use_liger:
        _apply_liger(hf)
    use_onednn(hf)
    if not train:
        return hf.requires_grad_(False).eval()
    model: nn.Module = hf
    if lora and cfg.lora_rank > 0:
        model = add_lora(hf, cfg.lora_rank, cfg.lora_alpha, cfg.lora_dropout, cfg.target_modules)
    if lora:
        freeze(model, cfg.freeze_prefix)
    if cfg.gradient_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def freeze(model: nn.Module, prefixes: list[str]) -> None:
    """Stop training every parameter whose Hugging Face name starts with one of ``prefixes``.

    Raises:
        ValueError: a prefix matches nothing, or nothing is left to train.
    """
    named = {hf_name(name): parameter for name, parameter in model.named_parameters()}
    for prefix in prefixes:
        matched = [parameter for name, parameter in named.items() if name.startswith(prefix)]
        if not matched:
            tops = sorted({".".join(name.split(".")[:2]) for name in named})
            raise UserError(f"--freeze_prefix {prefix!r} matches no parameter; names start with {', '.join(tops)}")
        for parameter in matched:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise UserError(f"--freeze_prefix {' '.join(prefixes)} leaves nothing to train")


def _apply_liger(hf: PreTrainedModel) -> None:
    if not torch.cuda.is_available():
        raise UserError("--use_liger needs a CUDA device: Liger's kernels are written in Triton; leave it out on CPU")
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as families
    except ImportError as error:
        raise UserError(
            f"--use_liger needs the liger extra: {install_command('liger')}, or --use_liger false") from error
    family = hf.config.model_type
    if family not in families:
        get_logger().warning(f"Liger has no kernels for {family}: the model computes with its own")
        return
    _apply_liger_kernel_to_instance(hf, fused_linear_cross_entropy=False, cross_entropy=False)


_CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
           "{% generation %}{{ m['content'] + END }}{% endgeneration %}{{ '\n' }}{% else %}"
           "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
           "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
_PLAIN = ("{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'Assistant: ' }}"
          "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{{ '\n' }}{% elif m['role'] == 'user' %}"
          "{{ 'User: ' + m['content'] + '\n' }}{% else %}{{ m['content'] + '\n' }}{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}")
_RAW = ("{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}"
        "{% endif %}{% endfor %}")

CHAT_TEMPLATES = {
    "chatml": _CHATML.replace("END", "'<|im_end|>'"),
    "plain": _PLAIN,  # User: ... / Assistant: ...
    "raw": _RAW,  # the texts alone, one after another; answers end with eos
}


def read_chat_template(name: str) -> str:
    """Return the Jinja text of a file, or of a built-in name; otherwise raise a ``ValueError`` that lists the names."""
    if name in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(
            f"unknown chat template {name!r}: not a file, and not one of {', '.join(sorted(CHAT_TEMPLATES))}")
    return path.read_text(encoding="utf-8")
