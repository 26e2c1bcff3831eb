"""Files that are whole at every moment: they are written beside their place, and then take it in one step."""

import contextlib
import os
import time
from pathlib import Path


@contextlib.contextmanager
def replacing(path):
    """Where to write what shall become the file `path`: `with replacing(path) as new: new.write_text(...)`.

    A file that is there is replaced in one step at the end, and keeps its permissions; when writing fails, or the
    program dies, it stays as it was. Folders are made where they are missing.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        yield new
        if path.exists():
            new.chmod(path.stat().st_mode & 0o777)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path, seconds=60.0):
    """Inside, no other process is that asks for the same `path`: to read the file, and to replace it by what follows.

    TimeoutError if another keeps it for so many `seconds`. One that dies gives it back.
    """
    path, deadline = Path(path), time.monotonic() + seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.lock")
    while True:
        with beside.open("w") as lock:
            if taken(lock, beside):
                try:
                    yield
                finally:
                    beside.unlink(missing_ok=True)
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process has kept {beside} for {seconds:.0f} s")
        time.sleep(0.01)


def taken(lock, beside):
    """Whether this process has got the open file `lock`, and it is still the one that lies there."""
    import fcntl  # not on Windows

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock.fileno()), beside.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
