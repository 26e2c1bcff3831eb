"""Multi-GPU training, hands on: the library of the book. `import mgpu_lib as mgpu`."""
import importlib

from .data import batches, load_fashion_mnist
from .devices import gpu_table, try_all_gpus, try_gpu, use_gpus
from .footprint import footprint
from .models import SimpleCNN, lenet, lenet_params, resnet18
from .parallel import allreduce, get_params, max_divergence, sgd, split_batch, train_batch
from .prediction import predict
from .primitives import data_parallel
from .timing import Timer
from .training import evaluate, train
from .virtual import current as current_machine
from .virtual import virtual_gpus

__all__ = ["SimpleCNN", "Timer", "allreduce", "batches", "current_machine", "data_parallel", "evaluate", "footprint",
           "get_params", "gpu_table", "lenet", "lenet_params", "load_fashion_mnist", "max_divergence", "predict",
           "resnet18", "sgd", "split_batch", "train", "train_batch", "try_all_gpus", "try_gpu", "use_gpus",
           "virtual_gpus"]

MODULES = ("checkpoints", "checks", "collectives", "exercises", "plots", "splitting", "traffic", "tuning",
           "widgets")


def __getattr__(name):
    if name in MODULES:  # imported when first asked for: some of them are slow
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
