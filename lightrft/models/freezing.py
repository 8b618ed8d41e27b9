"""Parameters that are not trained, by the words of ``--freeze_prefix``."""
from torch import nn
from transformers import PreTrainedModel

from lightrft.models.actor_modality import ActorModality
from lightrft.models.lora import base_model, hf_name
from lightrft.utils.errors import UserError
from lightrft.utils.logging import get_logger


def frozen_names(hf: PreTrainedModel, names: list[str], words: list[str], modality: ActorModality) -> set[str]:
    """Return those of the ``names`` of parameters of ``hf`` that ``words`` name: a part of the model
    (:meth:`ActorModality.parts`), or whole words of Hugging Face names ("embed_tokens", "model.layers.0").

    Raises:
        UserError: a word that does not end with ``?`` matches nothing, or nothing is left to train.
    """
    parts, found = modality.parts(hf, names), set[str]()
    for text in words:
        word = text.removesuffix("?")
        matched = parts.get(word) or [name for name in names if f".{word.strip('.')}." in f".{name}."]
        if not matched and text == word:
            tops = sorted({".".join(name.split(".")[:2]) for name in names})
            raise UserError(f"--freeze_prefix {word!r} matches no parameter; parts of this model are "
                            f"{', '.join(parts)}; names start with {', '.join(tops)}")
        found.update(matched)
    if found.issuperset(names):
        raise UserError(f"--freeze_prefix {' '.join(words)} leaves nothing to train. Leave out one of the parts "
                        f"{', '.join(parts)}, or name layers (a projector may be inside of a tower: language blocks)")
    return found


def freeze(model: nn.Module, words: list[str], modality: ActorModality) -> None:
    """Stop training the parameters of :func:`frozen_names`. Their number is logged."""
    named = {hf_name(name): parameter for name, parameter in model.named_parameters()}
    for name in frozen_names(base_model(model), list(named), words, modality) if words else ():
        named[name].requires_grad_(False)
    if words:
        frozen = sum(parameter.numel() for parameter in named.values() if not parameter.requires_grad)
        total = sum(parameter.numel() for parameter in named.values())
        get_logger().info(f"--freeze_prefix {' '.join(words)}: {frozen:,} of {total:,} parameters are frozen")
