"""What SGLang puts into the file system: sockets and counters, all under the name of one folder of this process."""
import atexit
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

_PREFIX, _IPC = "lightrft-sglang-", "ipc://"


def claim() -> Path:
    """A folder for one engine. What processes left that were killed goes."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not Path("/proc", folder.name.split("-")[2]).exists():
            remove(folder)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    atexit.register(remove, folder)
    return folder


def move(ports: Any, folder: Path) -> None:
    """Let SGLang's ``PortArgs`` name sockets in ``folder``, not files of a random name, and counters after it."""
    for field in fields(ports):
        name = getattr(ports, field.name)
        if isinstance(name, str) and name.startswith(_IPC):
            os.unlink(name.removeprefix(_IPC))
            setattr(ports, field.name, f"{_IPC}{folder}/{field.name}")
    ports.instance_id = folder.name


def remove(folder: Path) -> None:
    """The folder, and the counters in shared memory."""
    from sglang.srt.managers.load_snapshot import shm_path_for
    with suppress(OSError):  # it is not there, or another user's
        os.unlink(shm_path_for(folder.name))
    shutil.rmtree(folder, ignore_errors=True)
