"""Files that are whole at every moment: they are written beside their place, and then take it in one step."""

import contextlib
import getpass
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

try:
    import fcntl
except ImportError:  # Windows: there a file is a lock while it exists, and nobody else can make it
    fcntl = None


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[Path]:
    """Where to write what shall become the file `path`: `with replacing(path) as new: new.write_text(...)`.

    A file that is there is replaced in one step at the end, and keeps its permissions; when writing fails, or the
    program dies, it stays as it was. Folders are made where they are missing.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")  # no link can lie there already
    try:
        yield new
        if path.exists():
            new.chmod(path.stat().st_mode & 0o777)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: str | os.PathLike, seconds: float = 60.0) -> Iterator[None]:
    """Inside, no other process is that asks for the same `path`: to read the file, and to replace it by what follows.

    TimeoutError if another keeps it for so many `seconds`. One that dies gives it back, but not on Windows.
    """
    path, deadline = Path(path), time.monotonic() + seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.lock")
    while (lock := try_lock(beside)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process has kept {beside} for {seconds:.0f} s")
        time.sleep(0.01)
    try:
        yield
    finally:
        if fcntl is None:
            lock.close()  # or else Windows keeps the file
        beside.unlink(missing_ok=True)
        lock.close()


def try_lock(beside: Path) -> TextIO | None:
    """The open file `beside`, if this process has got it as its lock, or None."""
    if fcntl is None:
        with contextlib.suppress(FileExistsError):
            return open(beside, "x")
        return None
    lock = os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w")
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock.fileno()), beside.stat()):  # it is still the one that lies there
            return lock
    lock.close()
    return None


def private_folder(name: str) -> Path:
    """The folder `name`-<user> among the computer's temporary files, which this user alone can enter; PermissionError
    if something else lies there."""
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    path = Path(tempfile.gettempdir(), f"{name}-{user}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
    if not hasattr(os, "getuid"):  # Windows, where each user has such a folder
        return path
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        raise PermissionError(f"{path} is not a folder that only you can enter: remove it")
    return path
