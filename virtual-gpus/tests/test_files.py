"""Files are whole at every moment: one writer for all of them."""

import pytest

from virtual_gpus import replacing
from virtual_gpus.files import locked


def test_a_file_takes_the_place_of_the_old_one_at_the_end_or_not_at_all(tmp_path):
    path = tmp_path / "a" / "b" / "found.json"  # folders are made
    with replacing(str(path)) as new:
        new.write_text("old")
    path.chmod(0o640)
    with replacing(path) as new:
        new.write_text("half")
        assert new.parent == path.parent, "another disk could not take it in one step"
        assert path.read_text() == "old"
        new.write_text("new")
    with pytest.raises(OSError, match="disk is full"), replacing(path) as new:
        new.write_text("half")
        raise OSError("the disk is full")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_two_programs_do_not_write_into_one_file(tmp_path):
    with replacing(tmp_path / "found.json") as mine:
        mine.write_text("mine")
        with replacing(tmp_path / "found.json") as theirs:
            theirs.write_text("theirs")
        assert mine.read_text() == "mine" and (tmp_path / "found.json").read_text() == "theirs"
    assert (tmp_path / "found.json").read_text() == "mine"


def test_only_one_at_a_time_has_the_lock(tmp_path):
    path = tmp_path / "folder" / "file"
    with locked(path):
        path.write_text("mine")
        with pytest.raises(TimeoutError, match=r"another process has kept .*file\.lock for 0 s"), locked(path, 0.02):
            pass
    with pytest.raises(ZeroDivisionError), locked(path):
        1 / 0  # noqa: B018
    theirs = path.with_name("theirs")
    theirs.write_text("theirs")
    path.with_name("file.lock").symlink_to(theirs)
    with pytest.raises(OSError, match="symbolic links"), locked(path):
        pass
    assert theirs.read_text() == "theirs"
    theirs.unlink(), path.with_name("file.lock").unlink()
    with locked(path):
        assert [p.name for p in sorted(path.parent.iterdir())] == ["file", "file.lock"]
    assert [p.name for p in path.parent.iterdir()] == ["file"]
