"""Fashion-MNIST as tensors, and real handwritten digits in its place where it can't be had."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from itertools import chain, count
from pathlib import Path

import torch
from torch.nn import functional as F

from mgpu_lib.arguments import check_count

Data = namedtuple("Data", "name X_train y_train X_test y_test")

# MD5 of the four files as they lie on disk, decompressed: what `gunzip` makes of Zalando's archives. torchvision knows
# only the sums of the archives, and looks at them only while it downloads.
CHECKSUMS = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
SLICE = (6_000, 2_000)  # training and test images used unless MGPU_FULL=1: an epoch in seconds on a laptop
STALLED_S, TOTAL_S = 30, 900  # a download is given up when no byte arrives for so long, or when it takes so long in all
DOWNLOAD = """import socket, sys
socket.setdefaulttimeout(10)
from torchvision.datasets import FashionMNIST
FashionMNIST(sys.argv[1], download=True)"""


def require_torchvision():
    """The torchvision module. Raises ImportError, with what to install, when it is missing or does not fit torch."""
    try:
        import torchvision
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # "operator torchvision::nms does not exist"
        raise ImportError(
            f"torchvision does not fit torch {torch.__version__} ({error}): install both from one index, with "
            "`pip install --force-reinstall torch torchvision`, and for the CPU-only builds of both add "
            "`--index-url https://download.pytorch.org/whl/cpu`"
        ) from None
    return torchvision


def data_folder():
    """Where the data files lie: $MGPU_DATA, else mgpu_lib in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MGPU_DATA") or Path(cache) / "mgpu_lib").expanduser()


def load_fashion_mnist():
    """Images and labels on the CPU: Data(name, X_train, y_train, X_test, y_test). Prints one line that says which.

    X is float32 (N, 1, 28, 28) in [0, 1], y is int64 (N,) in 0…9. MGPU_FULL=1 takes all 60,000 and 10,000 images, else
    the first 6,000 and 2,000. Files are verified and fetched where needed; where that fails, or with MGPU_DATA=digits,
    scikit-learn's embedded handwritten digits stand in. Raises ImportError when torchvision is needed and doesn't work.
    """
    folder, why = data_folder(), "MGPU_DATA=digits"
    if str(folder) != "digits":
        require_torchvision()
        try:
            fetch_if_damaged(folder)
            data = read_fashion_mnist(folder, full=os.environ.get("MGPU_FULL") == "1")
            print(data.name)
            return data
        except OSError as error:
            why = str(error)
    data = load_digits()
    print(f"{data.name}, in place of Fashion-MNIST ({why})")
    return data


def read_fashion_mnist(folder, full):
    """Fashion-MNIST from files in torchvision's layout under `folder`: all of it, or the first images only."""
    from torchvision.datasets import FashionMNIST

    tensors, sizes = [], []
    for train, limit in zip((True, False), SLICE):
        dataset = FashionMNIST(folder, train=train)
        used = slice(None if full else limit)
        tensors += [dataset.data[used, None].float().div_(255), dataset.targets[used].long()]
        sizes.append(len(dataset))
    if full:
        return Data(f"Fashion-MNIST, {sizes[0]:,} training images", *tensors)
    return Data(f"Fashion-MNIST, {len(tensors[0]):,} of {sizes[0]:,} training images; MGPU_FULL=1 uses all", *tensors)


def load_digits():
    """scikit-learn's 1,797 handwritten digits, 8x8 enlarged to 28x28: 1,500 to train, the last 297 to test."""
    from sklearn import datasets

    digits = datasets.load_digits()
    X = F.interpolate(torch.from_numpy(digits.images).float()[:, None] / 16, size=(28, 28), mode="bilinear")
    y = torch.from_numpy(digits.target).long()
    return Data("scikit-learn's handwritten digits, 1,500 training images", X[:1500], y[:1500], X[1500:], y[1500:])


def whole_data(check=lambda: None):
    """All of Fashion-MNIST, whatever MGPU_FULL says; or the digits, where `load_fashion_mnist` would take those.

    `check` is called again and again during a download; what it raises ends that.
    """
    folder = data_folder()
    if str(folder) == "digits":
        return load_digits()
    try:
        fetch_if_damaged(folder, check)
        return read_fashion_mnist(folder, full=True)
    except OSError:
        return load_digits()


def hold_out(data):
    """(X, y, X_validation, y_validation): the last twelfth of the training images validates, 5,000 of 60,000."""
    kept = len(data.X_train) - len(data.X_train) // 12
    return data.X_train[:kept], data.y_train[:kept], data.X_train[kept:], data.y_train[kept:]


def damaged_files(folder):
    """The names of Fashion-MNIST's files that are missing under `folder` or hold other bytes than they should."""
    from torchvision.datasets.utils import check_integrity

    return [name for name, md5 in CHECKSUMS.items() if not check_integrity(raw(folder) / name, md5)]


def raw(folder):
    return Path(folder) / "FashionMNIST" / "raw"  # torchvision's layout


def fetch_if_damaged(folder, check=lambda: None):
    """Make the four files under `folder` whole, touching only those that aren't. Raises OSError saying why it can't.

    `check` is called again and again during a download; what it raises ends that.
    """
    damaged = damaged_files(folder)
    if not damaged:
        return
    try:
        raw(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder, ignore_cleanup_errors=True) as scratch:
            download(scratch, check)
            if damaged_files(scratch):
                raise OSError(f"the downloaded {', '.join(damaged_files(scratch))} has the wrong checksum")
            for name in damaged:
                os.replace(raw(scratch) / name, raw(folder) / name)
    except OSError as error:
        raise OSError(f"{', '.join(damaged)} missing or damaged in {raw(folder)}, and not replaced: {error}") from error


def download(folder, check):
    """Let torchvision download Fashion-MNIST into `folder`. Raises OSError when it fails, stalls or takes too long.

    It runs in a process of its own, because that can be stopped: torchvision and name look-up set no time limit.
    """
    log, command = Path(folder) / "log", [sys.executable, "-c", DOWNLOAD, str(folder)]
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            wait_while_growing(process, folder, check)
        finally:
            process.kill()
    if process.returncode:
        last_line = log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise OSError(f"the download failed ({last_line})")


def wait_while_growing(process, folder, check):
    """Wait for `process`. Raises TimeoutError when nothing is added to `folder` for STALLED_S or it takes TOTAL_S."""
    size, start = 0, time.monotonic()
    grown = start
    while process.poll() is None:
        check()
        now = time.monotonic()
        if folder_size(folder) > size:
            size, grown = folder_size(folder), now
        if now - grown > STALLED_S or now - start > TOTAL_S:
            raise TimeoutError(f"the download was given up after {now - start:.0f} s; {size:,} bytes had arrived")
        time.sleep(0.1)


def folder_size(folder):
    total = 0
    for path in Path(folder).rglob("*"):
        with contextlib.suppress(OSError):  # a file that went while we looked
            total += path.stat().st_size
    return total


def batches(X, y, batch_size, generator=None):
    """Iterate over (X_batch, y_batch) of `batch_size` rows; the last batch may be shorter.

    In order, as views of X and y; or shuffled by the torch.Generator `generator`, as copies.
    Raises ValueError when X and y differ in length or `batch_size` is below 1.
    """
    if len(X) != len(y):
        raise ValueError(f"X has {len(X)} rows and y has {len(y)}: each row needs one label")
    check_count("batch_size", batch_size)
    if generator is None:
        return zip(X.split(batch_size), y.split(batch_size))
    order = torch.randperm(len(X), generator=generator)
    return ((X[rows], y[rows]) for rows in order.split(batch_size))


def endless(X, y, batch_size, seed=0):
    """Batches for ever: epoch after epoch of `batches`, each shuffled anew. The same `seed` gives the same batches."""
    generator = torch.Generator().manual_seed(seed)
    return chain.from_iterable(batches(X, y, batch_size, generator) for _ in count())
