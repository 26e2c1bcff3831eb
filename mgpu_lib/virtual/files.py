"""Files that are whole at every moment: they are written beside their place, and then take it in one step."""

import contextlib
import os
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
