"""Configs of a decoder with some of its layers."""
from collections.abc import Sequence
from typing import Any

_KINDS = ("layer_types", "block_type")  # ends of the names of lists of kinds, of one layer too
_OTHERS = ("token_id", "multipliers")  # ends of the names of other lists, which may be as long
SHARED = "num_kv_shared_layers"  # the last ones, which have no keys and values of their own


def keep_layers(text: Any, kept: Sequence[int]) -> None:
    """Leave the layers ``kept``, by index, in the text config of a decoder, and what it lists for each layer.

    What a family computes of other fields follows from the number of layers.
    """
    own, apart = first_shared(text), set_apart(text)
    for name, values in lists_of_layers(text).items():
        setattr(text, name, [values[index] for index in kept])
    text.num_hidden_layers = len(kept)
    if apart:  # their indices are others now
        text.per_layer_config = {place: dict(apart[index]) for place, index in enumerate(kept) if index in apart}
    if SHARED in vars(text):
        setattr(text, SHARED, sum(index >= own for index in kept))
    if "hybrid_layer_ids" in vars(text):  # Zamba 2 numbers the layers that attend
        text.hybrid_layer_ids = [index for index, kind in enumerate(text.layer_types) if kind == "hybrid"]


def lists_of_layers(text: Any) -> dict[str, list[Any]]:
    """Return the fields of a text config that list a value for each of its layers, by name."""
    count = text.num_hidden_layers
    return {name: values for name, values in vars(text).items()
            if isinstance(values, list) and len(values) == count
            and (name.endswith(_KINDS) or count > 1 and not name.endswith(_OTHERS))}  # yapf: disable


def set_apart(text: Any) -> dict[int, dict[str, Any]]:
    """Return the fields of layers that differ from those of the others, such as wider heads, by the index of the layer.
    """
    spec = vars(text).get("_heterogeneity_spec")  # no public name has the differences alone
    return {} if spec is None else spec.per_layer_overrides


def first_shared(text: Any) -> int:
    """Return the index of the first layer that reads the keys of another one; without any, the number of layers."""
    return int(text.num_hidden_layers - (vars(text).get(SHARED) or 0))
