"""The split explorer: bytes that cross between GPUs in one training step, for three ways to share the work."""

import traitlets

from .base import InteractiveFigure, module, rect, size, text

BATCH_SIZES = [2**i for i in range(13)]
WAYS = {
    "layer_wise": ("splitting by layers", "#56b4e9"),
    "in_layer": ("splitting inside layers", "#e69f00"),
    "data_parallel": ("data parallelism", "#009e73"),
}


class SplitExplorer(InteractiveFigure):
    """Bars of what one training step of `network` with `batch_size` images moves between `num_gpus` GPUs, three ways.

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
        "where the network is split; the all-reduce of the parameters’ gradients in data parallelism. Counted in "
        "float32, without the batch’s own way to the GPUs. Under the batch sizes: which way moves least (L, I or D)."
    ).tag(sync=True)

    def __init__(self, data, **values):
        data = checked(data)
        super().__init__(data=data, **{"network": next(iter(data["networks"])), **values})

    @traitlets.validate(*controls)
    def _known(self, proposal):
        name, value = proposal["trait"].name, proposal["value"]
        most = len(next(iter(self.data["networks"].values()))["in_layer"])
        known = {"network": self.data["networks"], "batch_size": BATCH_SIZES, "num_gpus": range(2, most + 1)}[name]
        if value not in known:
            raise traitlets.TraitError(f"{name}={value!r}: choose one of {', '.join(map(repr, known))}")
        return value

    def bytes_moved(self):
        """Bytes per step for the values chosen now, {way: bytes}; None where the network can't be split that way."""
        net, k = self.data["networks"][self.network], self.num_gpus
        times = {"layer_wise": self.batch_size, "in_layer": self.batch_size, "data_parallel": 1}
        return {way: None if net[way][k - 1] is None else net[way][k - 1] * times[way] for way in WAYS}

    def change(self):
        """The rival of data parallelism, and the smallest batch at which that moves no more: (way, batch size).

        The batch size is None if there is none, and the way is None if the network can't be split at all.
        """
        net, k = self.data["networks"][self.network], self.num_gpus
        per_image = {way: net[way][k - 1] for way in ("layer_wise", "in_layer") if net[way][k - 1] is not None}
        if not per_image:
            return None, None
        way = min(per_image, key=per_image.get)
        return way, -(-net["data_parallel"][k - 1] // per_image[way]) if per_image[way] else None

    def least(self):
        """The way that moves least. Where data parallelism moves as much as another, it is data parallelism."""
        rival, batch_size = self.change()
        split = rival is not None and (batch_size is None or self.batch_size < batch_size)
        return rival if split else "data_parallel"

    def sentence(self):
        moved, least, (rival, batch_size) = self.bytes_moved(), self.least(), self.change()
        net = self.data["networks"][self.network]
        others = [
            f"{WAYS[way][0]} is not possible, with {net['layers']} layers" if n is None else f"{WAYS[way][0]} {size(n)}"
            for way, n in moved.items()
            if way != least
        ]
        words = f"{self.network} at batch {self.batch_size} on {self.num_gpus} GPUs: {WAYS[least][0]} moves least, "
        words += f"{size(moved[least])} per step ({'; '.join(others)}). "
        if rival is None or batch_size is None or batch_size <= 1:
            return words + "That is so at every batch size."
        if least == "data_parallel":
            return words + f"Below a batch of {batch_size}, {WAYS[rival][0]} moves least."
        return words + f"From a batch of {batch_size} on, data parallelism moves least."

    def picture(self):
        moved, least = self.bytes_moved(), self.least()
        most = max(n for n in moved.values() if n is not None) or 1
        elements = [text(12, 24, f"{self.network}, batch {self.batch_size}, {self.num_gpus} GPUs", weight=600)]
        for line, (way, n) in enumerate(moved.items()):
            y = 52 + 48 * line
            value = "not possible" if n is None else size(n)
            elements += [
                text(12, y, WAYS[way][0], weight=600 if way == least else 400),
                text(348, y, f"{value}, least" if way == least else value, "end", 600 if way == least else 400),
                rect(12, y + 7, 336 * (n or 0) / most, 18, WAYS[way][1]),
            ]
        return elements, 52 + 48 * 3 - 8


def checked(data):
    """{"networks": {name: …}} of what `traffic_table` returns; ValueError that says what is wrong."""
    try:
        networks = {net["name"]: {part: net[part] for part in ("layers", *WAYS)} for net in data}
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
                impossible = n is None and way != "data_parallel"
                if not impossible and not (isinstance(n, int) and n >= 0):
                    raise ValueError(f"{way} of {name!r} has {n!r}: give bytes, a whole number")
    return {"networks": networks}
