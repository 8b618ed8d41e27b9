"""Models in folders and on the Hugging Face hub: where one is, its contents, and the cache without a network."""
import fnmatch
import hashlib
import json
import os
import re
import socket
import sys
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from lightrft.utils.errors import first_line, UserError
from lightrft.utils.logging import get_logger

_BLOCK = 1 << 24  # bytes
MORE_THAN_TENSORS = (
    "reading it could run code. If you trust it, load it with the program that wrote it, and write the "
    "tensors as safetensors")
_MODEL_FILES = ("config.json", "*.safetensors", "*.bin")


def read_pretrained(kind: Any, path: str | Path, **kwargs: Any) -> Any:
    """Return ``kind.from_pretrained(path)``, where ``kind`` is a class of transformers; code beside the files never
    runs.

    Without the flag, transformers asks on the console whether it may run that code.

    Raises:
        UserError: the files can be read by code of their own only, or are pickles of more than tensors.
        ValueError: an entry of their JSON has a value of another type.
    """
    try:
        return kind.from_pretrained(path, trust_remote_code=False, **kwargs)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserError(f"{path} needs Python code of its own (auto_map in its .json files), and lightrft never runs "
                        "code of a model. Use a model of a family that transformers has") from error
    except UnpicklingError as error:
        raise UserError(f"{path} holds a file of weights that is no plain pickle of tensors: {MORE_THAN_TENSORS}") \
            from error
    except _wrong_types() as error:
        raise ValueError(" ".join(str(error).split())) from error


def _wrong_types() -> tuple[type[Exception], ...]:
    """Return the errors with which transformers meets values of another type."""
    from huggingface_hub import errors
    strict = getattr(errors, "StrictDataclassError", TypeError)  # of configs, in newer versions
    return TypeError, AttributeError, strict


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: the file holds none.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is no JSON: {first_line(error)}. Correct it, or copy the file again") from error
    if not isinstance(values, dict):
        raise UserError(f"{file} holds no JSON object. Correct it, or copy the file again")
    return values


def looks_local(path: str) -> bool:
    """Return True if ``path`` cannot be a hub id (``name`` or ``owner/name``)."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def model_folder(path: str) -> Path | None:
    """Return the local folder of a model; None for a hub id, which may then be read from the hub or its cache.

    Raises:
        ValueError: ``path`` is a file, or a local path that does not exist.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"model path {path!r} is a file; give the folder that holds config.json")
    if looks_local(path):
        raise UserError(
            f"model path {path!r} does not exist; give a Hugging Face folder or a hub id such as Qwen/Qwen2.5-0.5B")
    prefer_cache_without_network()
    return None


def files_of(path: str) -> Path | None:
    """Return the folder with the files of a model, itself or in the cache of the hub; None: they are not here."""
    folder = Path(path).expanduser()
    if not path or folder.is_dir() or looks_local(path):
        return folder if path and folder.is_dir() else None
    from huggingface_hub import try_to_load_from_cache
    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def is_no_model(path: str, error: BaseException) -> bool:
    """Return True if ``error``, of reading the hub id ``path``, will come again: the hub has no such model, or the name
    has no owner, as that of a folder with a typing error."""
    from huggingface_hub.errors import RepositoryNotFoundError
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RepositoryNotFoundError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None or "/" not in path


def model_is_here(path: str, complete: bool = False) -> bool:
    """Return True for the folder of a model, with ``complete`` only if weights are in it, and for a hub id whose
    weights are in the cache."""
    folder = Path(path).expanduser()
    if looks_local(path) or folder.exists():
        return not complete or _has_weights(folder)
    cached = files_of(path)
    return cached is not None and _has_weights(cached)


def _has_weights(folder: Path) -> bool:
    return any(file for pattern in _MODEL_FILES[1:] for file in folder.glob(pattern))


def model_digest(path: str, quick: bool = False) -> str:
    """Hash the configuration and the weights of the model at ``path``, a folder or hub id.

    Args:
        quick: read no weights: outside the cache of the hub, files are identified by name, size and modification time.
    """
    from transformers.utils import cached_file
    folder = model_folder(path) or Path(str(cached_file(path, "config.json"))).parent
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(file for pattern in _MODEL_FILES for file in folder.glob(pattern)):
        digest.update(f"{file.name}\0{_content(file, quick and file.suffix != '.json')}\0".encode())
    return digest.hexdigest()


def _content(file: Path, quick: bool) -> str:
    """Hash a file; in the cache of the hub its name is that hash."""
    if re.fullmatch("[0-9a-f]{64}", file.resolve().name):
        return file.resolve().name
    if quick:
        return f"{file.stat().st_size} {file.stat().st_mtime_ns}"
    digest = hashlib.sha256()
    with open(file, "rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def prefer_cache_without_network() -> None:
    """Switch the hub's clients to their offline mode if the hub has no address here.

    They then read their cache or fail at once. Else they ask again for half a minute, per file. A proxy may know the
    address, so with one nothing is switched. Call this before a hub id is read.
    """
    from huggingface_hub import constants
    host = urlsplit(constants.ENDPOINT).hostname or ""
    if constants.HF_HUB_OFFLINE or getproxies():
        return
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror as error:
        read_cache_only()
        get_logger().info(f"{host} has no address here ({error.strerror}): only files in the cache of the hub can be "
                          "read")


def read_cache_only() -> None:
    """Switch the hub's clients to their offline mode, also in worker processes."""
    from huggingface_hub import constants
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def download_model(name: str) -> None:
    """Download a model into the cache: its weights in one format, its tokenizer and its configuration.

    Raises:
        OSError, ValueError: the hub does not give it.
    """
    from huggingface_hub import HfApi, snapshot_download
    files = [file.rfilename for file in HfApi().model_info(name).siblings or ()]
    weights = [kind for kind in ("*.safetensors", "*.bin") if fnmatch.filter(files, kind)]
    snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", *weights[:1]],
                      ignore_patterns=["*/*", "consolidated*"])
