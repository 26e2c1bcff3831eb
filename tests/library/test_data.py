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
    part = load_fashion_mnist()
    monkeypatch.setenv("MGPU_FULL", "1")
    full = load_fashion_mnist()
    check_form(full, 30, 20)
    check_form(part, 12, 10)
    reference = FashionMNIST(folder, train=False)
    assert torch.equal(full.X_test, reference.data[:, None].float() / 255)
    assert torch.equal(full.y_test, reference.targets)
    assert torch.equal(part.X_train, full.X_train[:12]) and torch.equal(part.y_test, full.y_test[:10])
    assert capsys.readouterr().out == (
        "Fashion-MNIST, 12 of 30 training images; MGPU_FULL=1 uses all\nFashion-MNIST, 30 training images\n"
    )
    monkeypatch.delenv("MGPU_FULL")
    assert len(whole_data().X_train) == 30 and mirror.asked == []


@pytest.mark.parametrize("harm", [None, lambda content: content[:-1], lambda content: content[:-1] + b"\xff"])
def test_only_missing_and_damaged_files_are_fetched(folder, files, mirror, harm):
    whole = {name: content for name, content in files.items() if name != LABELS}
    write(folder, whole if harm is None else {**whole, LABELS: harm(files[LABELS])})
    check_form(load_fashion_mnist(), 30, 20)
    assert everything_in(folder) == files and mirror.asked == [LABELS]


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
    assert said.startswith(
        "scikit-learn's handwritten digits, 1,500 training images, in place of Fashion-MNIST (train-"
    )
    assert word in said and said.count("\n") == 1
    assert everything_in(folder) == {name: content for name, content in files.items() if name != LABELS}


def test_a_download_that_takes_too_long_is_given_up(folder, mirror, monkeypatch, capsys):
    monkeypatch.setattr(data, "TOTAL_S", -1)
    load_fashion_mnist()
    assert "given up after" in capsys.readouterr().out and everything_in(folder) == {}


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


def test_a_folder_that_cannot_be_made_is_no_obstacle(tmp_path, monkeypatch, mirror, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MGPU_DATA", str(tmp_path / "file" / "below"))
    assert len(load_fashion_mnist().X_train) == 1500
    assert "Not a directory" in capsys.readouterr().out and mirror.asked == []


def test_the_digits_are_those_of_scikit_learn(monkeypatch, capsys):
    """The sum is that of sklearn/datasets/data/digits.csv.gz."""
    monkeypatch.setenv("MGPU_DATA", "digits")
    loaded = load_fashion_mnist()
    check_form(loaded, 1500, 297)
    assert capsys.readouterr().out == (
        "scikit-learn's handwritten digits, 1,500 training images, in place of Fashion-MNIST (MGPU_DATA=digits)\n"
    )
    assert load_digits().name == "scikit-learn's handwritten digits, 1,500 training images"
    found = hashlib.sha256(data.DIGITS.read_bytes()).hexdigest()
    assert found == "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"


@pytest.mark.parametrize("rows, images, noted", [(60_000, 60_000, False), (6_000, 60_000, True), (6_000, 1280, False)])
def test_other_data_than_the_text_speaks_of_are_noted(capsys, rows, images, noted):
    data.note_other_data(load_digits(), 100)
    assert capsys.readouterr().out.startswith(
        "(Your run, on scikit-learn's handwritten digits, 1,500 training images. "
    )
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


def test_batches_in_order_are_views_and_complete():
    X, y = torch.arange(10.0).reshape(10, 1), torch.arange(10)
    parts = list(batches(X, y, 4))
    assert [len(part) for part, _ in parts] == [4, 4, 2]
    assert all(torch.equal(part[:, 0].long(), labels) for part, labels in parts)
    parts[0][0][0] = 99
    assert X[0] == 99


def test_shuffled_batches_keep_rows_and_labels_together():
    X, y = torch.arange(10.0).reshape(10, 1), torch.arange(10)
    generator, orders = torch.Generator().manual_seed(0), []
    for _ in range(2):
        parts = list(batches(X, y, 4, generator))
        assert all(torch.equal(part[:, 0].long(), labels) for part, labels in parts)
        orders.append(torch.cat([labels for _, labels in parts]).tolist())
        assert [len(part) for part, _ in parts] == [4, 4, 2] and sorted(orders[-1]) == list(range(10))
    again = batches(X, y, 4, torch.Generator().manual_seed(0))
    assert torch.cat([labels for _, labels in again]).tolist() == orders[0] != orders[1] != list(range(10))


@pytest.mark.parametrize(
    "rows, labels, size, message",
    [(3, 2, 1, "X has 3 rows and y has 2"), (3, 3, 0, "batch_size is 0"), (3, 3, -1, "batch_size is -1")],
)
def test_batches_refuse_what_makes_no_sense_at_once(rows, labels, size, message):
    with pytest.raises(ValueError, match=message):
        batches(torch.zeros(rows), torch.zeros(labels), size)


def test_endless_batches_are_epochs_in_other_orders():
    X = torch.arange(5)
    generator = torch.Generator().manual_seed(3)
    expected = [rows.tolist() for _ in range(3) for rows, _ in batches(X, X, 2, generator)]
    found = [rows.tolist() for rows, _ in itertools.islice(endless(X, X, 2, seed=3), 9)]
    assert found == expected and [len(rows) for rows in found] == [2, 2, 1] * 3
    assert found[:3] != found[3:6]
