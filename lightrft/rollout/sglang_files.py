"""What SGLang puts into the file system: sockets and counters, all under the name of one folder of this process."""
import atexit
import hashlib
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from lightrft.utils.errors import UserError

_PREFIX, _IPC = "lightrft-sglang-", "ipc://"
_SOCKET_PATH, _SOCKET_NAME = 107, len("/00")  # bytes that Linux takes, and what one adds to the folder


def claim() -> Path:
    """A folder for one engine. What processes left that were killed goes.

    Raises:
        UserError: sockets in it would have longer names than the system takes.
    """
    ours = f"{_PREFIX}{_here()}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{ours}*"):
        if not Path("/proc", folder.name.removeprefix(ours).split("-")[0]).exists():
            remove(folder)
    folder = Path(tempfile.mkdtemp(prefix=f"{ours}{os.getpid()}-"))
    atexit.register(remove, folder)
    if (excess := len(os.fsencode(folder)) + _SOCKET_NAME - _SOCKET_PATH) > 0:
        raise UserError(f"TMPDIR {folder.parent}: SGLang's sockets there would have names of more than {_SOCKET_PATH} "
                        f"bytes; set TMPDIR to a path that is at least {excess} bytes shorter, such as /tmp")
    return folder


def _here() -> str:
    """What tells the processes of this ``/proc`` from those of other machines and containers with the same TMPDIR."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # unknown: a name that is never met again, so that nothing is removed
        return secrets.token_hex(4)
    return hashlib.blake2s(f"{boot} {space} {os.uname().nodename}".encode(), digest_size=4).hexdigest()


def move(ports: Any, folder: Path) -> None:
    """Let SGLang's ``PortArgs`` name sockets in ``folder``, not files of a random name, and counters after it."""
    for i, field in enumerate(fields(ports)):
        name = getattr(ports, field.name)
        if isinstance(name, str) and name.startswith(_IPC):
            os.unlink(name.removeprefix(_IPC))
            setattr(ports, field.name, f"{_IPC}{folder}/{i}")
    ports.instance_id = folder.name


def remove(folder: Path) -> None:
    """The folder, and the counters in shared memory."""
    from sglang.srt.managers.load_snapshot import shm_path_for
    with suppress(OSError):  # it is not there, or another user's
        os.unlink(shm_path_for(folder.name))
    shutil.rmtree(folder, ignore_errors=True)
