"""The memory explorer: what fills a GPU's memory in one training step, and how that is measured."""

from functools import partial

import torch
import traitlets
from torch.nn import functional as F

from mgpu_lib.footprint import footprint, size_on
from mgpu_lib.widgets.base import InteractiveFigure, module
from virtual_gpus import find_gpu, virtual_gpus

MAKE_OPTIMIZER = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.001),
}
DTYPES = {"fp32": None, "amp": torch.bfloat16}


class MemoryExplorer(InteractiveFigure):
    """Bars of what one training step keeps in memory at its peak, against what a GPU holds.

    `data` is what `memory_table` returns. Raises ValueError when a part of it is missing, and TraitError for a
    `batch_size`, `network`, `optimizer`, `precision` or `gpu` that it doesn't have. Sizes are in bytes.
    """

    _esm = module("memory.js")
    controls = ("batch_size", "network", "optimizer", "precision", "gpu")
    batch_size = traitlets.Int().tag(sync=True)
    network = traitlets.Unicode().tag(sync=True)
    optimizer = traitlets.Enum(list(MAKE_OPTIMIZER), "sgd").tag(sync=True)
    precision = traitlets.Enum(list(DTYPES), "fp32").tag(sync=True)
    gpu = traitlets.Unicode().tag(sync=True)
    caption = traitlets.Unicode(
        "What fills a GPU’s memory when the forward pass ends, with the last step’s gradients still in place, and how "
        "much more, the batch included, the step takes at its peak. Move the batch size and watch which part grows. "
        "Counted tensor by tensor on a virtual GPU; what CUDA and its libraries keep on a real GPU comes on top."
    ).tag(sync=True)

    def __init__(self, data, **values):
        data = checked_memory(data)
        network, gpu = next(iter(data["networks"])), next(iter(data["gpus"]))
        sizes = list(data["networks"][network]["activations"]["fp32"])
        start = {"network": network, "gpu": gpu, "batch_size": sizes[len(sizes) // 2]}
        super().__init__(data=data, **{**start, **values})

    @traitlets.validate("batch_size", "network", "gpu")
    def _known(self, proposal):
        name, value = proposal["trait"].name, proposal["value"]
        networks = self.data["networks"]
        sizes = next(iter(networks.values()))["activations"]["fp32"]
        known = {"batch_size": sizes, "network": networks, "gpu": self.data["gpus"]}[name]
        if value not in known:
            choice = ", ".join(map(repr, known))
            raise traitlets.TraitError(f"{name}={value!r} was not measured; choose one of {choice}")
        return value

    def parts(self):
        """Bytes of each part for the values chosen now: parameters, gradients, optimizer (state), activations."""
        net = self.data["networks"][self.network]
        return {
            "parameters": net["parameters"],
            "gradients": net["gradients"],
            "optimizer": net["optimizer"][self.optimizer],
            "activations": net["activations"][self.precision][self.batch_size],
            "scratch": net["scratch"][self.precision][self.optimizer][self.batch_size],
        }


def checked_memory(data):
    """`data` with numbers as batch sizes, where JSON made them text; ValueError that names what is missing."""
    try:
        networks = {name: _checked_network(net) for name, net in data["networks"].items()}
        gpus = {name: int(n_bytes) for name, n_bytes in data["gpus"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"data isn't what memory_table() returns ({type(error).__name__}: {error})") from error
    if not networks or not gpus:
        raise ValueError(f"data has {len(networks)} networks and {len(gpus)} GPUs: at least one of each is needed")
    sizes = {tuple(table) for net in networks.values() for table in net["activations"].values()}
    if len(sizes) > 1 or () in sizes:
        raise ValueError(f"every network needs the same batch sizes, one at least; data has {sorted(sizes)}")
    return {"networks": networks, "gpus": gpus}


def _checked_network(net):
    def by_batch_size(table):
        return dict(sorted((int(batch_size), int(n_bytes)) for batch_size, n_bytes in table.items()))

    return {
        "parameters": int(net["parameters"]),
        "gradients": int(net["gradients"]),
        "optimizer": {name: int(net["optimizer"][name]) for name in MAKE_OPTIMIZER},
        "activations": {name: by_batch_size(net["activations"][name]) for name in DTYPES},
        "scratch": {
            name: {optimizer: by_batch_size(net["scratch"][name][optimizer]) for optimizer in MAKE_OPTIMIZER}
            for name in DTYPES
        },
    }


def memory_table(networks, batch_sizes, gpus):
    """Measure what MemoryExplorer shows: training steps on a virtual GPU that holds shapes only, so in seconds.

    `networks` is {name: (make_net, shape)}: `make_net()` gives a module and `shape` is that of one input, such as
    (1, 28, 28); its outputs are logits. A network that reads tokens has a third item, their type: with
    (make_net, (128,), torch.int64) a batch is so many sequences of 128 tokens, and each token has logits and a label.
    `gpus` are data-sheet keys such as "T4". Steps are measured with `footprint`.

    Returns {"networks": {name: {"parameters": n, "gradients": n, "optimizer": {optimizer: n},
    "activations": {precision: {batch_size: n}}, "scratch": {precision: {optimizer: {batch_size: n}}}}}, "gpus":
    {key: n}}, in bytes; "amp" is autocast to bfloat16 with float32 parameters. The five parts add up to the peak:
    "scratch" is the rest of it, the batch itself and buffers that live for a moment.
    """
    with virtual_gpus(1, backing="meta") as machine:
        ledger = machine.ledgers[0]
        # Steps that no GPU could hold are measured too: by how much they don't fit.
        ledger.capacity = 2**60
        measured = {name: _measure_network(batch_sizes, *network) for name, network in networks.items()}
    return {"networks": measured, "gpus": {key: find_gpu(key).memory for key in gpus}}


def _measure_network(batch_sizes, make_net, shape, kind=torch.float32):
    net = make_net().to("cuda:0")
    result = {"optimizer": {}, "activations": {}, "scratch": {}}
    for precision, dtype in DTYPES.items():
        scratch = result["scratch"][precision] = {}
        for optimizer, make_optimizer in MAKE_OPTIMIZER.items():
            plain, scratch[optimizer] = scratch.get("sgd"), {}
            settled = False
            for batch_size in sorted(batch_sizes):
                # Buffers of the optimizer's step don't grow with the batch, those of the backward pass do. Once these
                # set the peak the optimizer no longer matters, and plain SGD has been measured already.
                if not settled:
                    parts = _measure_step(net, _make_batch(batch_size, shape, kind), make_optimizer, dtype)
                    settled = plain is not None and parts["scratch"] == plain[batch_size]
                scratch[optimizer][batch_size] = plain[batch_size] if settled else parts["scratch"]
                if plain is None:
                    result["activations"].setdefault(precision, {})[batch_size] = parts["activations"]
            result["optimizer"][optimizer] = parts["optimizer_state"]
    return {**result, "parameters": parts["parameters"], "gradients": parts["gradients"]}


def _make_batch(batch_size, shape, kind):
    """(X, y) on the GPU: a label for each input, and for each token where inputs are whole numbers."""
    X = torch.zeros(batch_size, *shape, dtype=kind, device="cuda:0")
    labels = batch_size if kind.is_floating_point else X.shape
    return X, torch.zeros(labels, dtype=torch.int64, device="cuda:0")


def _mean_loss(logits, y):
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def _measure_step(net, batch, make_optimizer, dtype):
    X, y = batch
    optimizer = make_optimizer(net.parameters())
    # Gradients that stay from step to step are there during the forward pass too, so that the parts can be added.
    # The net's method, not the optimizer's own: an optimizer that refers to itself would be counted in the next step.
    optimizer.zero_grad = partial(net.zero_grad, set_to_none=False)
    parts = footprint(net, X, y, optimizer, _mean_loss, dtype)
    gradients = size_on(X.device, [p.grad for p in net.parameters()])
    net.zero_grad(set_to_none=True)
    kept = parts["parameters"] + gradients + parts["optimizer_state"] + parts["activations"]
    return {**parts, "gradients": gradients, "scratch": parts["peak"] - kept}
