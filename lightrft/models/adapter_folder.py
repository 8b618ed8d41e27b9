"""Refuses adapters beside a model: transformers would load both and train one of them."""
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers.utils.peft_utils import find_adapter_config_file

from lightrft.utils.errors import UserError

ADAPTER_CONFIG = "adapter_config.json"


def refuse_adapter(path: str, folder: Path | None) -> None:
    """Refuse the ``folder`` of the model ``path`` if it holds an adapter; None (a hub id) is not looked at.

    Raises:
        UserError: naming the command that merges the two.
    """
    if folder is not None and (folder / ADAPTER_CONFIG).is_file():
        whole = (folder / "config.json").is_file()
        raise UserError(_both(path) if whole else _alone(path))


def refuse_hub_adapter(path: str, whole: bool = True) -> None:
    """Refuse the hub id ``path`` if it holds an adapter, on the hub or in its cache, beside a ``whole`` model or alone.

    Raises:
        UserError: naming the command that merges the two.
    """
    if find_adapter_config_file(path) is not None:
        raise UserError(_both(path) if whole else _alone(path))


def _alone(path: str) -> str:
    return (f"{path!r} is an adapter without its model ({ADAPTER_CONFIG}, and no config.json). Merge the two: "
            f"{_merging('MODEL', path)}, then give OUT")


def _both(path: str) -> str:
    return (f"{path!r} holds a model and an adapter ({ADAPTER_CONFIG}), so it does not say which of the two is meant. "
            f"Merge them: {_merging(path, path)}, then give OUT; for the model alone, move the adapter's files away")


def _merging(model: str, adapter: str) -> str:
    return f"lightrft merge_lora --model_path {model} --lora_path {adapter} --output_path OUT"


@contextmanager
def without_adapter(path: str) -> Iterator[str]:
    """Context with the path of the model at ``path`` alone: ``path`` itself, or, for a folder that holds an adapter
    too, a folder of links to its other files."""
    folder = Path(path).expanduser()
    if not (folder / ADAPTER_CONFIG).is_file() or not (folder / "config.json").is_file():
        yield path
        return
    with TemporaryDirectory(prefix="lightrft-model-") as alone:
        for file in folder.resolve().iterdir():
            if not file.name.startswith("adapter_"):
                (Path(alone) / file.name).symlink_to(file)
        yield alone
