"""Fashion-MNIST is verified, fetched whole or not at all, and real digits stand in for it, saying so."""

import gzip
import hashlib
import io
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torchvision.datasets import FashionMNIST

from mgpu_lib import data
from mgpu_lib.data import batches, endless, load_digits, load_fashion_mnist, raw, whole_data

ROWS = {"train": 30, "t10k": 20}
LABELS = "t10k-labels-idx1-ubyte"
DIGITS = "scikit-learn's handwritten digits, 1,500 training images"


@pytest.fixture(scope="module")
def files():
    """The four files in Fashion-MNIST's format, small, of made-up images: name -> bytes."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for part, rows in ROWS.items():
        images = torch.randint(256, (rows, 28, 28), dtype=torch.uint8, generator=generator)
        labels = torch.arange(rows, dtype=torch.uint8) % 10
        header = [n.to_bytes(4, "big") for n in (0x803, rows, 28, 28, 0x801, rows)]
        made[f"{part}-images-idx3-ubyte"] = b"".join(header[:4]) + images.numpy().tobytes()
        made[f"{part}-labels-idx1-ubyte"] = b"".join(header[4:]) + labels.numpy().tobytes()
    return made


@pytest.fixture
def folder(tmp_path, monkeypatch, files):
    """An empty MGPU_DATA folder, for which `files` are the right ones."""
    folder = tmp_path / "data"
    monkeypatch.setenv("MGPU_DATA", str(folder))
    monkeypatch.delenv("MGPU_FULL", raising=False)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    monkeypatch.setattr(data, "CHECKSUMS", sums)
    return folder


@pytest.fixture
def mirror(monkeypatch, files):
    """The server of the archives: `asked` is what was asked of it, `broken` what it makes of an archive, by name."""
    mirror = SimpleNamespace(asked=[], broken={})

    def urlopen(address, timeout):
        name = address.removeprefix(data.ADDRESS).removesuffix(".gz")
        mirror.asked.append(name)
        return io.BytesIO(mirror.broken.get(name, bytes)(gzip.compress(files[name])))

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    return mirror


def silence(archive):
    raise TimeoutError("timed out")


def write(folder, files):
    raw(folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (raw(folder) / name).write_bytes(content)


def everything_in(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_form(loaded, train, test):
    for X, y, rows in ((loaded.X_train, loaded.y_train, train), (loaded.X_test, loaded.y_test, test)):
        assert X.shape == (rows, 1, 28, 28) and y.shape == (rows,)
        assert X.dtype == torch.float32 and y.dtype == torch.int64
        assert X.min() >= 0 and 0.9 < X.max() <= 1 and y.min() == 0 and y.max() == 9


def test_whole_files_are_read_as_torchvision_reads_them_and_none_is_fetched(folder, files, mirror, monkeypatch, capsys):
    write(folder, files)
    monkeypatch.setattr(data, "SLICE", (12, 10))
    part, full = load_fashion_mnist(), whole_data()
    monkeypatch.setenv("MGPU_FULL", "1")
    assert load_fashion_mnist().X_train.equal(full.X_train)
    check_form(full, 30, 20)
    check_form(part, 12, 10)
    reference = FashionMNIST(folder, train=False)
    assert torch.equal(full.X_test, reference.data[:, None].float() / 255)
    assert torch.equal(full.y_test, reference.targets)
    assert torch.equal(part.X_train, full.X_train[:12]) and torch.equal(part.y_test, full.y_test[:10])
    assert capsys.readouterr().out == (
        "Fashion-MNIST, 12 of 30 training images; MGPU_FULL=1 uses all\nFashion-MNIST, 30 training images\n"
    )
    assert mirror.asked == []


def test_only_missing_and_damaged_files_are_fetched(folder, files, mirror):
    damaged = "train-labels-idx1-ubyte"
    there = {name: content for name, content in files.items() if name != LABELS}
    write(folder, there | {damaged: files[damaged][:-1] + b"\xff"})
    check_form(load_fashion_mnist(), 30, 20)
    assert everything_in(folder) == files and sorted(mirror.asked) == [LABELS, damaged]


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (lambda archive: archive[:-20], "gave no whole archive"),
        (lambda archive: b"not what was asked for"[: len(archive)], "gave no whole archive"),
        (lambda archive: gzip.compress(b"other"), "the downloaded t10k-labels-idx1-ubyte has the wrong checksum"),
        (silence, "timed out"),
    ],
    ids=["cut off", "a web page", "another file", "silence"],
)
def test_what_is_not_whole_is_never_trained_on(folder, files, mirror, capsys, broken, word):
    mirror.broken[LABELS] = broken
    check_form(load_fashion_mnist(), 1500, 297)
    said = capsys.readouterr().out
    assert said.startswith(f"{DIGITS}, in place of Fashion-MNIST (train-")
    assert word in said and said.count("\n") == 1
    assert everything_in(folder) == {name: content for name, content in files.items() if name != LABELS}


def test_what_takes_too_long_or_can_not_be_kept_is_not_fetched(folder, mirror, monkeypatch, capsys):
    monkeypatch.setattr(data, "TOTAL_S", -1)
    load_fashion_mnist()
    assert "given up after" in capsys.readouterr().out and everything_in(folder) == {}
    folder.with_name("file").touch()
    monkeypatch.setenv("MGPU_DATA", str(folder.with_name("file") / "below"))
    mirror.asked.clear()
    assert len(load_fashion_mnist().X_train) == 1500
    assert "Not a directory" in capsys.readouterr().out and mirror.asked == []


def test_a_failure_is_remembered_for_the_session(folder, files, mirror, capsys):
    mirror.broken["train-images-idx3-ubyte"] = lambda archive: b""
    load_fashion_mnist()
    first = capsys.readouterr().out
    load_fashion_mnist()
    again = capsys.readouterr().out
    assert mirror.asked == ["train-images-idx3-ubyte"]
    assert "(no second try in this session after: " in again and "has the wrong checksum" in again
    assert len(again) < len(first) and whole_data().name in again, "Train shows this name"
    write(folder, files)
    assert len(load_fashion_mnist().X_train) == 30, "files that arrive by other means count at once"


def test_a_download_that_nobody_wants_any_more_ends(folder, mirror):
    def check():
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        whole_data(check)
    assert everything_in(folder) == {} and mirror.asked == ["train-images-idx3-ubyte"]
    assert len(whole_data().X_train) == 30, "to stop is no failure"


def test_the_digits_are_those_of_scikit_learn(monkeypatch, capsys):
    """The sum is that of sklearn/datasets/data/digits.csv.gz."""
    monkeypatch.setenv("MGPU_DATA", "digits")
    loaded = load_fashion_mnist()
    check_form(loaded, 1500, 297)
    assert capsys.readouterr().out == f"{DIGITS}, in place of Fashion-MNIST (MGPU_DATA=digits)\n"
    found = hashlib.sha256(data.DIGITS.read_bytes()).hexdigest()
    assert found == "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"


@pytest.mark.parametrize("rows, images, noted", [(60_000, 60_000, False), (6_000, 60_000, True), (6_000, 1280, False)])
def test_other_data_than_the_text_speaks_of_are_noted(capsys, rows, images, noted):
    data.note_other_data(load_digits(), 100)
    assert capsys.readouterr().out.startswith(f"(Your run, on {DIGITS}. ")
    data.note_other_data(data.Data("Fashion-MNIST, some", *4 * [range(rows)]), images)
    assert bool(capsys.readouterr().out) == noted


def test_the_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("MGPU_DATA", "~/images")
    assert data.data_folder() == Path.home() / "images"
    monkeypatch.delenv("MGPU_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data.data_folder() == Path("/cache/mgpu_lib")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.data_folder() == Path.home() / ".cache" / "mgpu_lib"


# Batches


@pytest.fixture
def ten():
    """Ten rows that say which they are, and their labels."""
    return torch.arange(10.0).reshape(10, 1), torch.arange(10)


def test_batches_in_order_are_views_and_complete(ten):
    parts = list(batches(*ten, 4))
    assert [labels.tolist() for _, labels in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(torch.equal(part[:, 0].long(), labels) for part, labels in parts)
    parts[0][0][0] = 99
    assert ten[0][0] == 99


def test_shuffled_batches_keep_rows_and_labels_together_and_each_epoch_has_another_order(ten):
    generator, found = torch.Generator().manual_seed(3), []
    for part, labels in itertools.islice(endless(*ten, 4, seed=3), 6):
        assert torch.equal(part[:, 0].long(), labels)
        found.append(labels)
    first, second = (torch.cat(found[i : i + 3]).tolist() for i in (0, 3))
    assert list(map(len, found)) == [4, 4, 2] * 2 and sorted(first) == sorted(second) == list(range(10))
    assert list(range(10)) != first != second
    assert first + second == torch.cat([labels for _ in "12" for _, labels in batches(*ten, 4, generator)]).tolist()


def test_batches_refuse_what_makes_no_sense_at_once(ten):
    with pytest.raises(ValueError, match="X has 10 rows and y has 9"):
        batches(ten[0], ten[1][1:], 1)
    with pytest.raises(ValueError, match="batch_size is 0"):
        batches(*ten, 0)
