"""The batch splitter: who gets which rows of a batch."""

import traitlets

from .base import InteractiveFigure, module, rect, text

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#a6a6a6")


def shard_sizes(rows, num_gpus, way):
    """Rows per GPU, one number for each GPU: as `torch.tensor_split` ("split_batch") or `torch.chunk` ("scatter")."""
    if way == "scatter":
        each = -(-rows // num_gpus)
        return [min(each, max(rows - gpu * each, 0)) for gpu in range(num_gpus)]
    return [rows // num_gpus + (gpu < rows % num_gpus) for gpu in range(num_gpus)]


def join(words):
    return ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else "".join(words)


class BatchSplitter(InteractiveFigure):
    """Who gets which rows of a batch of `batch_size` (1 to 64) on `num_gpus` (1 to 8) GPUs.

    `way="split_batch"` is this book's way (sizes differ by at most one, as in `torch.tensor_split`), `way="scatter"`
    that of `torch.nn.parallel.scatter` (equal pieces until the rows run out, as in `torch.chunk`).
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

    def shards(self):
        """A `range` of rows for each GPU; empty for a GPU that gets nothing."""
        ranges, start = [], 0
        for count in shard_sizes(self.batch_size, self.num_gpus, self.way):
            ranges.append(range(start, start + count))
            start += count
        return ranges

    def sentence(self):
        busy = [(gpu, rows) for gpu, rows in enumerate(self.shards()) if rows]
        idle = [str(gpu) for gpu, rows in enumerate(self.shards()) if not rows]
        moves = []
        for i, (gpu, rows) in enumerate(busy):
            what = f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]}–{rows[-1]}"
            verb = "" if i else "goes " if len(rows) == 1 else "go "
            moves.append(f"{what} {verb}to GPU {gpu}")
        words = join(moves) + "."
        if idle:
            words += f" GPU{'s' * (len(idle) > 1)} {join(idle)} get{'s' * (len(idle) == 1)} nothing."
        if len(busy) > 1:
            weights = [f"{len(rows)}/{self.batch_size}" for _, rows in busy]
            equal = len(set(weights)) == 1
            shards = f"Each of these shards weighs {weights[0]}" if equal else f"The shards weigh {join(weights)}"
            words += f" {shards} in the mean over the batch."
        return words[0].upper() + words[1:]

    def picture(self):
        wide = min(36, 336 / self.batch_size)
        elements = [text(12, 24, f"the batch: {self.batch_size} row{'s' * (self.batch_size > 1)}", weight=600)]
        y = 84
        for gpu, rows in enumerate(self.shards()):
            elements += [rect(12 + wide * row, 34, wide - 1, 22, COLORS[gpu]) for row in rows]
            what = "nothing" if not rows else f"row {rows[0]}" if len(rows) == 1 else f"rows {rows[0]} to {rows[-1]}"
            share = f"{len(rows)}/{self.batch_size}" if rows else ""
            elements += [
                rect(12, y - 13, 16, 16, COLORS[gpu] if rows else "#fff", "#8a919c"),
                text(38, y, f"GPU {gpu}", weight=600),
                text(110, y, what),
                text(340, y, share, "end"),
            ]
            y += 24
        return elements, y - 6
