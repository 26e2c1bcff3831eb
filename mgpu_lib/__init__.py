"""Multi-GPU training, hands on: the library of the book. `import mgpu_lib as mgpu`."""

import importlib

from mgpu_lib.data import batches, load_fashion_mnist, note_other_data
from mgpu_lib.devices import gpu_table, try_all_gpus, try_gpu, use_gpus
from mgpu_lib.footprint import footprint
from mgpu_lib.launching import launch
from mgpu_lib.models import SimpleCNN, lenet, lenet_module, lenet_params, resnet18
from mgpu_lib.parallel import allreduce, get_params, max_divergence, sgd, split_batch, train_batch
from mgpu_lib.prediction import predict
from mgpu_lib.primitives import data_parallel
from mgpu_lib.ranks import start_ranks
from mgpu_lib.table import Table
from mgpu_lib.timing import Timer
from mgpu_lib.training import evaluate, train
from mgpu_lib.transformer import LLAMA, Transformer
from virtual_gpus import current as current_machine
from virtual_gpus import dry_run, virtual_gpus

__all__ = [
    "LLAMA",
    "SimpleCNN",
    "Table",
    "Timer",
    "Transformer",
    "allreduce",
    "batches",
    "current_machine",
    "data_parallel",
    "dry_run",
    "evaluate",
    "footprint",
    "get_params",
    "gpu_table",
    "launch",
    "lenet",
    "lenet_module",
    "lenet_params",
    "load_fashion_mnist",
    "max_divergence",
    "note_other_data",
    "predict",
    "resnet18",
    "sgd",
    "split_batch",
    "start_ranks",
    "train",
    "train_batch",
    "try_all_gpus",
    "try_gpu",
    "use_gpus",
    "virtual_gpus",
]

MODULES = (
    "checkpoints",
    "collectives",
    "ddp",
    "exercises",
    "experts",
    "plots",
    "schedules",
    "splitting",
    "tensor_parallel",
    "text",
    "traffic",
    "tuning",
    "widgets",
    "zero",
)


def __getattr__(name):
    if name == "checks":
        return importlib.import_module("virtual_gpus.checks")
    if name in MODULES:  # imported when first asked for: some of them are slow
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
