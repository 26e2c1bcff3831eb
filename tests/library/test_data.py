"""Fashion-MNIST is verified, fetched whole or not at all, and real digits stand in for it, saying so."""

import gzip
import hashlib
import itertools
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torchvision.datasets import FashionMNIST

from mgpu_lib import data
from mgpu_lib.data import CHECKSUMS, batches, endless, load_digits, load_fashion_mnist, raw, whole_data

ROWS = {"train": 30, "t10k": 20}
GARBAGE = b"not what was asked for"


@pytest.fixture(scope="session")
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
    monkeypatch.setattr(data, "CHECKSUMS", {name: hashlib.md5(content).hexdigest() for name, content in files.items()})
    return folder


def write(folder, files):
    raw(folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (raw(folder) / name).write_bytes(content)


@pytest.fixture
def network(monkeypatch, files):
    """A network that has the files; `network` counts its uses."""
    uses = []
    monkeypatch.setattr(data, "download", lambda folder, check: (uses.append(folder), write(folder, files)))
    return uses


@pytest.fixture
def no_network(monkeypatch):
    def download(folder, check):
        raise OSError("the network is unreachable")

    monkeypatch.setattr(data, "download", download)


def everything_in(folder):
    return {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def check_shapes(loaded, train, test):
    assert loaded.X_train.shape == (train, 1, 28, 28) and loaded.X_test.shape == (test, 1, 28, 28)
    assert loaded.y_train.shape == (train,) and loaded.y_test.shape == (test,)
    for X, y in ((loaded.X_train, loaded.y_train), (loaded.X_test, loaded.y_test)):
        assert X.dtype == torch.float32 and y.dtype == torch.int64
        assert X.min() >= 0 and 0.9 < X.max() <= 1 and y.min() == 0 and y.max() == 9


def test_whole_files_are_read_and_nothing_is_fetched(folder, files, no_network, capsys):
    write(folder, files)
    loaded = load_fashion_mnist()
    check_shapes(loaded, 30, 20)
    reference = FashionMNIST(folder, train=False)
    assert torch.equal((loaded.X_test[:, 0] * 255).round().byte(), reference.data)
    assert torch.equal(loaded.y_test, reference.targets)
    assert capsys.readouterr().out == "Fashion-MNIST, 30 of 30 training images; MGPU_FULL=1 uses all\n"


def test_the_slice_is_the_start_and_full_is_all(folder, files, monkeypatch, capsys):
    write(folder, files)
    monkeypatch.setattr(data, "SLICE", (12, 5))
    part = load_fashion_mnist()
    monkeypatch.setenv("MGPU_FULL", "1")
    full = load_fashion_mnist()
    assert torch.equal(part.X_train, full.X_train[:12]) and torch.equal(part.y_test, full.y_test[:5])
    assert (len(part.y_train), len(part.X_test), len(full.X_train), len(full.X_test)) == (12, 5, 30, 20)
    assert capsys.readouterr().out == (
        "Fashion-MNIST, 12 of 30 training images; MGPU_FULL=1 uses all\nFashion-MNIST, 30 training images\n"
    )


@pytest.mark.parametrize("harm", ["missing folder", "missing file", "truncated", "wrong bytes", "empty"])
def test_damaged_files_are_fetched_again(folder, files, network, harm):
    name = "train-images-idx3-ubyte"
    if harm != "missing folder":
        write(folder, files)
        path = raw(folder) / name
        content = path.read_bytes()
        path.unlink()
        if harm == "truncated":
            path.write_bytes(content[:-1])
        elif harm == "wrong bytes":
            path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        elif harm == "empty":
            path.touch()
    check_shapes(load_fashion_mnist(), 30, 20)
    assert everything_in(folder) == files  # whole, and no scratch left
    load_fashion_mnist()
    assert len(network) == 1


def test_whole_files_are_not_touched_when_others_are_fetched(folder, files, network):
    write(folder, files)
    kept, damaged = raw(folder) / "t10k-images-idx3-ubyte", raw(folder) / "t10k-labels-idx1-ubyte"
    os.utime(kept, (1, 1))
    damaged.write_bytes(GARBAGE)
    load_fashion_mnist()
    assert kept.stat().st_mtime == 1 and damaged.read_bytes() == files[damaged.name]


def test_without_a_network_digits_stand_in_and_say_why(folder, no_network, capsys):
    check_shapes(load_fashion_mnist(), 1500, 297)
    out = capsys.readouterr().out
    assert out.startswith("scikit-learn's handwritten digits, 1,500 training images, in place of Fashion-MNIST (train-")
    assert "the network is unreachable" in out and out.count("\n") == 1
    assert everything_in(folder) == {}


def test_damaged_files_are_never_trained_on(folder, files, no_network, capsys):
    write(folder, {**files, "t10k-labels-idx1-ubyte": GARBAGE})
    assert len(load_fashion_mnist().X_train) == 1500
    assert "t10k-labels-idx1-ubyte missing or damaged" in capsys.readouterr().out


def test_a_download_that_breaks_off_leaves_nothing(folder, files, monkeypatch):
    def download(scratch, check):
        write(scratch, {name: content[:40] for name, content in files.items()})
        raise OSError("the connection was reset")

    monkeypatch.setattr(data, "download", download)
    assert len(load_fashion_mnist().X_train) == 1500
    assert everything_in(folder) == {}


def test_a_downloaded_file_with_the_wrong_bytes_is_refused(folder, files, monkeypatch, capsys):
    write(folder, {**files, "t10k-labels-idx1-ubyte": b""})
    monkeypatch.setattr(
        data, "download", lambda scratch, check: write(scratch, {**files, "t10k-labels-idx1-ubyte": GARBAGE})
    )
    load_fashion_mnist()
    assert "the downloaded t10k-labels-idx1-ubyte has the wrong checksum" in capsys.readouterr().out
    assert everything_in(folder)["t10k-labels-idx1-ubyte"] == b""


def test_a_folder_that_cannot_be_made_is_no_obstacle(tmp_path, monkeypatch, network, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MGPU_DATA", str(tmp_path / "file" / "below"))
    assert len(load_fashion_mnist().X_train) == 1500
    assert "Not a directory" in capsys.readouterr().out and not network


def test_digits_can_be_asked_for(monkeypatch, network, capsys):
    monkeypatch.setenv("MGPU_DATA", "digits")
    monkeypatch.setattr(data, "require_torchvision", lambda: pytest.fail("digits need no torchvision"))
    loaded = load_fashion_mnist()
    check_shapes(loaded, 1500, 297)
    assert torch.equal(loaded.y_train[:10], torch.arange(10))
    assert capsys.readouterr().out == (
        "scikit-learn's handwritten digits, 1,500 training images, in place of Fashion-MNIST (MGPU_DATA=digits)\n"
    )
    assert not network


def test_the_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("MGPU_DATA", "~/images")
    assert data.data_folder() == Path.home() / "images"
    monkeypatch.delenv("MGPU_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", os.sep + "cache")
    assert data.data_folder() == Path(os.sep + "cache", "mgpu_lib")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.data_folder() == Path.home() / ".cache" / "mgpu_lib"


def test_the_real_files_pass():
    """Where the reader has them: the sums written down are those of the real files."""
    folder = data.data_folder()
    if not all((raw(folder) / name).is_file() for name in CHECKSUMS):
        pytest.skip("Fashion-MNIST isn't on this machine")
    assert data.damaged_files(folder) == []
    loaded = data.read_fashion_mnist(folder, full=True)
    check_shapes(loaded, 60_000, 10_000)
    assert loaded.y_train.bincount().tolist() == [6000] * 10 and loaded.y_test.bincount().tolist() == [1000] * 10


# The download itself, from a web server on this machine, by torchvision in its own process.

SERVER = """
import http.server, sys, time
folder, mode = sys.argv[1:]
class Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *args): super().__init__(*args, directory=folder)
    def do_GET(self):
        if mode == "silent": time.sleep(60)
        if mode == "trickle":
            self.send_response(200); self.end_headers()
            while True: self.wfile.write(b"x"); self.wfile.flush(); time.sleep(.05)
        super().do_GET()
    do_HEAD = do_GET
    def log_message(self, *args): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def mirror(tmp_path, monkeypatch, files):
    """`mirror(mode)` starts a server of the archives and lets torchvision in the download's process use it."""
    archives = tmp_path / "archives"
    archives.mkdir()
    resources = []
    for name, content in files.items():
        archive = gzip.compress(content)
        (archives / f"{name}.gz").write_bytes(archive)
        resources.append((f"{name}.gz", hashlib.md5(archive).hexdigest()))
    servers = []

    def start(mode):
        server = subprocess.Popen([sys.executable, "-c", SERVER, archives, mode], stdout=subprocess.PIPE, text=True)
        servers.append(server)
        address = f"http://127.0.0.1:{server.stdout.readline().strip()}/"
        redirect(monkeypatch, address, resources)
        return archives

    yield start
    for server in servers:
        server.kill()
        server.wait(timeout=10)
        server.stdout.close()


def redirect(monkeypatch, address, resources=FashionMNIST.resources):
    imports, rest = data.DOWNLOAD.split("FashionMNIST(")
    source = f"FashionMNIST.mirrors, FashionMNIST.resources = [{address!r}], {resources!r}\n"
    monkeypatch.setattr(data, "DOWNLOAD", f"{imports}{source}FashionMNIST({rest}")


@pytest.mark.slow
def test_torchvision_downloads_into_the_folder(folder, files, mirror):
    mirror("whole")
    check_shapes(load_fashion_mnist(), 30, 20)
    assert everything_in(folder) == files


@pytest.mark.slow
def test_a_damaged_archive_is_refused(folder, mirror, capsys):
    archives = mirror("whole")
    (archives / "t10k-images-idx3-ubyte.gz").write_bytes(GARBAGE)
    load_fashion_mnist()
    assert re.search(r"the download failed \(.*corrupted", capsys.readouterr().out)
    assert everything_in(folder) == {}


@pytest.mark.slow
def test_a_closed_port_is_reported_at_once(folder, monkeypatch, capsys):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening
        redirect(monkeypatch, f"http://127.0.0.1:{unused.getsockname()[1]}/")
        load_fashion_mnist()
    assert "refused" in capsys.readouterr().out
    assert everything_in(folder) == {}


def test_a_download_that_nobody_wants_any_more_ends(folder, mirror):
    mirror("silent")
    asked = []

    def check():
        asked.append(1)
        if len(asked) == 3:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        data.fetch_if_damaged(folder, check)
    assert len(asked) == 3 and everything_in(folder) == {} and not list(folder.glob(".fetching-*"))


@pytest.mark.parametrize("mode, limit", [("silent", "STALLED_S"), ("trickle", "TOTAL_S")])
@pytest.mark.slow
def test_a_download_that_hangs_is_given_up(folder, mirror, monkeypatch, capsys, mode, limit):
    mirror(mode)
    monkeypatch.setattr(data, limit, 4)
    load_fashion_mnist()  # returns, though the mirror never ends
    assert "the download was given up after" in capsys.readouterr().out
    assert everything_in(folder) == {}


# torchvision that does not fit.


def run_with_torchvision(path, code):
    """Run `code` where `path` comes first on Python's path: the last line it prints, and the last of its errors."""
    paths = os.pathsep.join([str(path), str(Path(data.__file__).parents[1])])
    env = {**os.environ, "MGPU_DATA": "", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    return done.stdout.strip(), done.stderr.strip().rpartition("\n")[2]


@pytest.mark.slow
def test_a_mismatched_torchvision_says_what_to_install(tmp_path):
    """torchvision without its compiled operators fails as it does beside another index's torch."""
    original, broken = Path(torchvision.__file__).parent, tmp_path / "torchvision"
    broken.mkdir()
    for entry in original.iterdir():
        if entry.suffix not in (".so", ".pyd"):
            (broken / entry.name).symlink_to(entry)
    code = """
from mgpu_lib import data, models
for attempt in (data.load_fashion_mnist, models.resnet18):  # the second import fails in another way
    try: attempt()
    except ImportError as error: print(error)
data.require_torchvision()"""
    out, error = run_with_torchvision(tmp_path, code)
    assert len(out.splitlines()) == 2, (out, error)
    assert "nms does not exist" in out.splitlines()[0]
    for line in (*out.splitlines(), error):
        assert "install both from one index" in line and "pip install --force-reinstall torch torchvision" in line


def test_a_missing_torchvision_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match="pip install --force-reinstall torch torchvision"):
        data.require_torchvision()


@pytest.mark.slow
def test_importing_loads_nothing_heavy():
    code = (
        "import sys, mgpu_lib.data, mgpu_lib.models, mgpu_lib.parallel, mgpu_lib.footprint; "
        "print({'torchvision', 'sklearn', 'matplotlib', 'IPython'} & set(sys.modules) or 'nothing')"
    )
    assert run_with_torchvision("", code)[0] == "nothing"


# Batches.


def test_batches_in_order_are_views_and_complete():
    X, y = torch.arange(10.0).reshape(10, 1), torch.arange(10)
    parts = list(batches(X, y, 4))
    assert [len(part) for part, _ in parts] == [4, 4, 2]
    assert torch.equal(torch.cat([part for part, _ in parts]), X)
    parts[0][0][0] = 99
    assert X[0] == 99


def test_shuffled_batches_keep_rows_and_labels_together():
    X, y = torch.arange(10.0).reshape(10, 1), torch.arange(10)
    generator = torch.Generator().manual_seed(0)
    first, second = [list(batches(X, y, 4, generator)) for epoch in range(2)]
    for parts in (first, second):
        assert [len(part) for part, _ in parts] == [4, 4, 2]
        assert all(torch.equal(part[:, 0].long(), labels) for part, labels in parts)
        assert sorted(torch.cat([labels for _, labels in parts]).tolist()) == list(range(10))
    orders = [torch.cat([labels for _, labels in parts]).tolist() for parts in (first, second)]
    assert orders[0] != orders[1] != list(range(10))
    again = batches(X, y, 4, torch.Generator().manual_seed(0))
    assert torch.cat([labels for _, labels in again]).tolist() == orders[0]


@pytest.mark.parametrize(
    "rows, labels, size, message",
    [(3, 2, 1, "X has 3 rows and y has 2"), (3, 3, 0, "batch_size is 0"), (3, 3, -1, "batch_size is -1")],
)
def test_batches_refuse_what_makes_no_sense_at_once(rows, labels, size, message):
    with pytest.raises(ValueError, match=message):
        batches(torch.zeros(rows), torch.zeros(labels), size)


def test_whole_data_are_all_images_or_the_digits(monkeypatch, tmp_path):
    assert whole_data().name == load_digits().name
    monkeypatch.setenv("MGPU_DATA", str(tmp_path))
    asked = []
    monkeypatch.setattr(data, "fetch_if_damaged", lambda folder, check: asked.append(folder))
    monkeypatch.setattr(data, "read_fashion_mnist", lambda folder, full: (folder, full))
    assert whole_data() == (tmp_path, True) and asked == [tmp_path]

    def no_network(folder, check):
        raise OSError("no network")

    monkeypatch.setattr(data, "fetch_if_damaged", no_network)
    assert whole_data().name == load_digits().name


def test_endless_batches_are_epochs_in_other_orders():
    X = torch.arange(5)
    generator = torch.Generator().manual_seed(3)
    expected = [rows.tolist() for _ in range(3) for rows, _ in batches(X, X, 2, generator)]
    found = [rows.tolist() for rows, _ in itertools.islice(endless(X, X, 2, seed=3), 9)]
    assert found == expected and [len(rows) for rows in found] == [2, 2, 1] * 3
    assert found[:3] != found[3:6]
