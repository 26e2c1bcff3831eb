"""The split explorer: bytes that cross between GPUs in one training step, for three ways to share the work."""

import traitlets

from mgpu_lib.widgets.base import InteractiveFigure, module

BATCH_SIZES = [2**i for i in range(13)]
WAYS = ("pipeline", "tensor", "data")


class SplitExplorer(InteractiveFigure):
    """Bars of what one training step of `network` with `batch_size` texts moves between `num_gpus` GPUs, three ways.

    `data` is what `traffic_table` returns. Raises ValueError when a part of it is missing, and TraitError for
    a `network` or `num_gpus` that it doesn't have and a `batch_size` that isn't a power of two from 1 to 4096.
    """

    _esm = module("splits.js")
    controls = ("network", "batch_size", "num_gpus")
    network = traitlets.Unicode().tag(sync=True)
    batch_size = traitlets.Int(64).tag(sync=True)
    num_gpus = traitlets.Int(2).tag(sync=True)
    caption = traitlets.Unicode(
        "Bytes that cross between GPUs in one training step, summed over all GPUs: activations and their gradients "
        "where the network is cut; the all-reduce of the parameters’ gradients in data parallelism. The batch is in "
        "texts of 8,192 tokens; activations are in BF16, gradients of parameters in FP32. Enlarge the batch and watch "
        "which bar stays. Under the batch sizes: which way moves least (P, T or D)."
    ).tag(sync=True)

    def __init__(self, data, **values):
        data = checked_traffic(data)
        super().__init__(data=data, **{"network": next(iter(data["networks"])), **values})

    @traitlets.validate(*controls)
    def _known(self, proposal):
        name, value = proposal["trait"].name, proposal["value"]
        most = len(next(iter(self.data["networks"].values()))["data"])
        known = {"network": self.data["networks"], "batch_size": BATCH_SIZES, "num_gpus": range(2, most + 1)}[name]
        if value not in known:
            raise traitlets.TraitError(f"{name}={value!r}: choose one of {', '.join(map(repr, known))}")
        return value


def checked_traffic(data):
    """{"networks": {name: …}} of what `traffic_table` returns; ValueError that says what is wrong."""
    try:
        networks = {net["name"]: {part: net[part] for part in ("limits", *WAYS)} for net in data}
        lengths = {len(net[way]) for net in networks.values() for way in WAYS}
    except (KeyError, TypeError) as error:
        raise ValueError(f"data isn't what traffic_table() returns ({type(error).__name__}: {error})") from error
    if not networks or len(networks) < len(data):
        raise ValueError(f"data needs one network at least, each with its own name; it has {[n['name'] for n in data]}")
    if len(lengths) > 1 or min(lengths) < 2:
        raise ValueError(f"every list needs as many numbers of GPUs, 2 at least; data has lists of {sorted(lengths)}")
    for name, net in networks.items():
        for way in WAYS:
            for n in net[way][1:]:
                impossible = n is None and way != "data"
                if not impossible and not (isinstance(n, int) and n >= 0):
                    raise ValueError(f"{way} of {name!r} has {n!r}: give bytes, a whole number")
    return {"networks": networks}
