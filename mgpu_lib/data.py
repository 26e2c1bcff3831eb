"""Fashion-MNIST as tensors, and real handwritten digits in its place where it can't be had."""

import gzip
import hashlib
import http.client
import os
import time
import urllib.request
import zlib
from collections import namedtuple
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from mgpu_lib.arguments import check_count
from virtual_gpus import replacing

Data = namedtuple("Data", "name X_train y_train X_test y_test")

ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"  # its authors'; there is no https, but sums
CHECKSUMS = {  # SHA-256 of the four files as they lie on disk, decompressed
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
SLICE = (6_000, 2_000)  # training and test images used unless MGPU_FULL=1: an epoch in seconds on a laptop
SILENT_S, TOTAL_S = 10, 900  # a file is given up when no byte arrives for so long, or when it takes so long in all
# The file of the handwritten digits that `load_digits` reads; digits.txt beside it says where they come from.
DIGITS = Path(__file__).with_name("digits.csv.gz")
_failed = {}  # folder: why it couldn't be filled. It isn't tried again in this session: each try may take a while


def data_folder():
    """Where the data files lie: $MGPU_DATA, else mgpu_lib in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MGPU_DATA") or Path(cache) / "mgpu_lib").expanduser()


def load_fashion_mnist():
    """Images and labels on the CPU: Data(name, X_train, y_train, X_test, y_test). Prints one line that says which.

    X is float32 (N, 1, 28, 28) in [0, 1], y is int64 (N,) in 0…9. MGPU_FULL=1 takes all 60,000 and 10,000 images, else
    the first 6,000 and 2,000. Files are verified and fetched where needed; where that fails, or with MGPU_DATA=digits,
    1,797 handwritten digits that come with the library stand in.
    """
    data = fashion_mnist_or_digits(full=os.environ.get("MGPU_FULL") == "1")
    print(data.name)
    return data


def note_other_data(data, images=60_000):
    """Say beside an output that it comes from other data than the text speaks of: those of the stored run.

    That run had all of Fashion-MNIST, of which the cell used no more than the first `images` of training.
    """
    if not data.name.startswith("Fashion-MNIST") or len(data.X_train) < images:
        which = data.name.partition(", in place of")[0]  # why was said when it was loaded
        print(f"(Your run, on {which}. The text speaks of the stored run, on all of Fashion-MNIST.)")


def whole_data(check=lambda: None):
    """All of Fashion-MNIST, whatever MGPU_FULL says; or the digits, where `load_fashion_mnist` would take those.

    `check` is called again and again during a download; what it raises ends that.
    """
    return fashion_mnist_or_digits(full=True, check=check)


def fashion_mnist_or_digits(full, check=lambda: None):
    """Fashion-MNIST from `data_folder()`, or else the digits: the name of the data then says why."""
    folder, why = data_folder(), "MGPU_DATA=digits"
    if str(folder) != "digits":
        try:
            fetch_if_damaged(folder, check)
            return read_fashion_mnist(folder, full)
        except OSError as error:
            why = str(error)
    digits = load_digits()
    return digits._replace(name=f"{digits.name}, in place of Fashion-MNIST ({why})")


def read_fashion_mnist(folder, full):
    """Fashion-MNIST from its files under `folder`: all of it, or the first images only."""
    tensors, sizes = [], []
    for part, limit in zip(("train", "t10k"), SLICE):
        images, labels = (raw(folder) / f"{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
        X = torch.from_numpy(np.fromfile(images, np.uint8, offset=16)).view(-1, 1, 28, 28)  # behind the header
        y = torch.from_numpy(np.fromfile(labels, np.uint8, offset=8))
        used = slice(None if full else limit)
        tensors += [X[used].float().div_(255), y[used].long()]
        sizes.append(len(X))
    if full:
        return Data(f"Fashion-MNIST, {sizes[0]:,} training images", *tensors)
    return Data(f"Fashion-MNIST, {len(tensors[0]):,} of {sizes[0]:,} training images; MGPU_FULL=1 uses all", *tensors)


def load_digits():
    """scikit-learn's 1,797 handwritten digits, 8x8 enlarged to 28x28: 1,500 to train, the last 297 to test."""
    table = torch.from_numpy(np.loadtxt(DIGITS, delimiter=","))
    X = F.interpolate(table[:, :64].float().view(-1, 1, 8, 8) / 16, size=(28, 28), mode="bilinear")
    y = table[:, 64].long()
    return Data("scikit-learn's handwritten digits, 1,500 training images", X[:1500], y[:1500], X[1500:], y[1500:])


def hold_out(data):
    """(X, y, X_validation, y_validation): the last twelfth of the training images validates, 5,000 of 60,000."""
    kept = len(data.X_train) - len(data.X_train) // 12
    return data.X_train[:kept], data.y_train[:kept], data.X_train[kept:], data.y_train[kept:]


def raw(folder):
    return Path(folder) / "FashionMNIST" / "raw"  # torchvision's layout


def damaged_files(folder):
    """The names of Fashion-MNIST's files that are missing under `folder` or hold other bytes than they should."""
    paths = {name: raw(folder) / name for name in CHECKSUMS}
    return [name for name, path in paths.items() if not path.is_file() or damaged(name, path.read_bytes())]


def damaged(name, content):
    return hashlib.sha256(content).hexdigest() != CHECKSUMS[name]


def fetch_if_damaged(folder, check=lambda: None):
    """Make the four files under `folder` whole, touching only those that aren't. Raises OSError saying why it can't.

    `check` is called again and again during a download; what it raises ends that.
    """
    names = damaged_files(folder)
    if names and folder in _failed:
        raise OSError(f"no second try in this session after: {_failed[folder]}; restart Python to try again")
    try:
        raw(folder).mkdir(parents=True, exist_ok=True)  # before anything is downloaded for it
        for name in names:
            content = download(f"{ADDRESS}{name}.gz", check)
            if damaged(name, content):
                raise OSError(f"the downloaded {name} has the wrong checksum")
            with replacing(raw(folder) / name) as new:
                new.write_bytes(content)
    except (OSError, http.client.HTTPException) as error:
        _failed[folder] = error
        raise OSError(f"{', '.join(names)} missing or damaged in {raw(folder)}, and not replaced: {error}") from error


def download(address, check):
    """What the gzip archive at `address` holds. Raises OSError when it isn't whole, stalls or takes too long."""
    archive, start = bytearray(), time.monotonic()
    with urllib.request.urlopen(address, timeout=SILENT_S) as response:
        while part := response.read1(1 << 16):
            check()
            archive += part
            if time.monotonic() - start > TOTAL_S:
                raise TimeoutError(f"given up after {TOTAL_S} s; {len(archive):,} bytes had arrived")
    try:
        return gzip.decompress(archive)
    except (OSError, EOFError, zlib.error) as error:
        raise OSError(f"{address} gave no whole archive ({error})") from error


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
