"""The batch splitter: who gets which rows of a batch."""

import traitlets

from mgpu_lib.widgets.base import InteractiveFigure, module


class BatchSplitter(InteractiveFigure):
    """Who gets which rows of a batch of `batch_size` (1 to 64) on `num_gpus` (1 to 8) GPUs.

    `way="split_batch"` is this book's way (sizes differ by at most one, as in `torch.tensor_split`), `way="scatter"`
    that of `torch.nn.parallel.scatter` (equal pieces until the rows run out, as in `torch.chunk`). Raises TraitError
    for other values.
    """

    _esm = module("splitter.js")
    controls = ("batch_size", "num_gpus", "way")
    batch_size = traitlets.Int(10, min=1, max=64).tag(sync=True)
    num_gpus = traitlets.Int(4, min=1, max=8).tag(sync=True)
    way = traitlets.Enum(["split_batch", "scatter"], "split_batch").tag(sync=True)
    caption = traitlets.Unicode(
        "Who gets which rows of a batch. Try a batch that the number of GPUs does not divide, and one smaller than "
        "the number of GPUs; then compare the two ways to split."
    ).tag(sync=True)
