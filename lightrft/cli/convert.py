"""Turn a checkpoint into a Hugging Face model: ``lightrft convert CHECKPOINT OUT --pretrain MODEL``.

CHECKPOINT is one of this library (as for ``lightrft export``), a DeepSpeed folder, or a folder that
``torch.distributed.checkpoint`` wrote.
"""
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightrft.cli.export import check_empty, export, write_model
from lightrft.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    write_model(
        "lightrft convert", convert, "checkpoint or run of this library, DeepSpeed folder, or DCP folder",
        "the model that the run started from: its architecture, tokenizer and processor. A checkpoint of this library "
        "knows it", argv)


def convert(checkpoint: Path, out: Path, pretrain: str = "") -> None:
    """Write the model of a checkpoint to ``out``, with tokenizer and processor.

    Raises:
        UserError: there is no checkpoint of a known kind, the model does not fit it, or ``out`` is not empty.
    """
    from lightrft.models.loader import load_exported
    from lightrft.models.tokenizer import load_tokenizer, save_tokenizer
    from lightrft.strategy.foreign_checkpoints import match_names, open_checkpoint
    from lightrft.strategy.mtp import dropped_weights
    from lightrft.utils.file_mode import give_modes
    check_empty(out)
    foreign = open_checkpoint(checkpoint) if checkpoint.is_dir() else None
    if foreign is None:
        export(checkpoint, out, pretrain)
        return
    if not pretrain:
        raise UserError(f"{checkpoint} is a {foreign.kind} folder, which does not name its model; give the model that "
                        "the training started from with --pretrain")
    model = load_exported(pretrain)
    try:
        names = match_names(foreign.names, model.state_dict(), model.all_tied_weights_keys, _computed(model))
    except UserError as error:
        raise UserError(f"{checkpoint}: {error}") from None
    tensors = foreign.read(list(names.values()))
    state = {name: tensors[there] for name, there in names.items()}
    _check_tied(model, state, checkpoint)
    _fill(model, state, checkpoint)
    model.save_pretrained(out, state_dict=model.state_dict() | dict(dropped_weights(model)))
    save_tokenizer(load_tokenizer(pretrain), out, pretrain)
    give_modes(out)


def _computed(model: "PreTrainedModel") -> list[str]:
    """Return patterns of names that a checkpoint of ``model`` may have and it does not read: buffers that it computes,
    and what its class ignores."""
    buffers = [f"^{re.escape(name)}$" for name, _ in model.named_buffers()]
    return [*buffers, *(model._keys_to_ignore_on_load_unexpected or ())]


def _check_tied(model: "PreTrainedModel", state: dict[str, "Tensor"], checkpoint: Path) -> None:
    """Refuse weights that differ in ``state`` and are one in ``model``, which would drop one of them."""
    for name, shared in model.all_tied_weights_keys.items():
        if name in state and shared in state and not state[name].equal(state[shared]):
            raise UserError(f"{checkpoint}: {name} differs from {shared} there, and both are one weight of --pretrain "
                            "(tie_word_embeddings): it was trained with separate weights. Give --pretrain a copy "
                            'of the model whose config.json has "tie_word_embeddings": false')


def _fill(model: "PreTrainedModel", state: dict[str, "Tensor"], checkpoint: Path) -> None:
    """Give the weights of ``state`` to ``model``."""
    shapes = model.state_dict()
    for name, tensor in state.items():
        if tensor.shape != shapes[name].shape:
            raise UserError(f"{checkpoint} is of another model: {name} has shape {list(tensor.shape)} there and "
                            f"{list(shapes[name].shape)} in --pretrain")
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()


if __name__ == "__main__":
    main()
