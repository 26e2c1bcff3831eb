"""The book's matplotlib look, and its recurring figures: test accuracy per epoch, comparisons with intervals, dots."""

import io
import statistics
from functools import partial

# Two of Okabe and Ito's colors, one of Paul Tol's, and black: four that differ clearly for color-blind readers, each
# with a contrast of 3 or more to white. The white background is part of the figure: a dark page changes nothing.
PALETTE = ("#0072B2", "#D55E00", "#882255", "#000000")
PASSES = {"F": "#0072B2", "B": "#B34700", "W": "#00785A"}  # of a pipeline; white letters can be read on each
DASHES = ("-", "--", "-.", ":")  # a second mark beside the color
SIZE, DPI = (6.4, 3.6), 150  # inches, and pixels per inch: every figure has 960 x 540 pixels


def book_style():
    """The look as matplotlib's rcParams. DejaVu Sans comes with matplotlib, so every machine draws the same letters."""
    from cycler import cycler

    return {
        "figure.figsize": SIZE,
        "figure.dpi": DPI,
        "savefig.dpi": DPI,
        "figure.constrained_layout.use": True,
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "axes.facecolor": "white",
        "font.family": "DejaVu Sans",
        "mathtext.fontset": "dejavusans",
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.prop_cycle": cycler(color=PALETTE, linestyle=DASHES),
        "lines.linewidth": 2,
        "lines.markersize": 5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#DDDDDD",
        "grid.linewidth": 0.8,
        "axes.axisbelow": True,
        "legend.frameon": False,
    }


def use_book_style():
    """Give all later figures the book's look. In a notebook also makes their PNGs the same bytes on every run."""
    import matplotlib

    matplotlib.rcParams.update(book_style())
    if notebook():
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("png", bbox_inches=None, metadata={"Software": None})  # fixed size, no version inside


def accuracy_curves(histories, ax=None):
    """Plot test accuracy per epoch for every `label: history` in the dict `histories`; returns the Axes.

    A history is what `train` returns. Without `ax` the current Axes are used, or new ones.
    """
    import matplotlib.pyplot as plt

    ax = plt.gca() if ax is None else ax
    for label, history in histories.items():
        ax.plot(
            [entry["epoch"] for entry in history],
            [entry["test_accuracy"] for entry in history],
            marker="o",
            label=label,
        )
    ax.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend()
    return ax


def forest(rows, nothing=0, number="{:+.1f}", ax=None):
    """A forest plot: one line for each (label, (middle, low, high)) of `rows`, pairs or a dict, from top to bottom.

    The dot is filled where the interval from `low` to `high` leaves out `nothing`, the dotted line, and hollow where it
    doesn't: there the data can't say which of the two is larger. At the right stand the middle and the ends, in the
    format `number`. A label whose row is None is a heading; one whose row is a text has that text in its line. Returns
    the Axes.
    """
    import matplotlib.pyplot as plt

    ax = plt.gca() if ax is None else ax
    labels, rows = zip(*(rows.items() if isinstance(rows, dict) else rows))
    ax.axvline(nothing, color="#000000", linestyle=":", linewidth=1)
    for place, row in enumerate(rows):
        if isinstance(row, str):
            ax.text(0.99, place, row, fontsize=8.5, ha="right", va="center", transform=ax.get_yaxis_transform())
        elif row is not None:
            middle, low, high = row
            sure = not low <= nothing <= high
            color = PALETTE[0] if sure else "#767676"
            ax.hlines(place, low, high, color=color)
            ax.plot(middle, place, "o", color=color, markerfacecolor=color if sure else "white")
            numbers = "{} ({} to {})".format(*map(number.format, row))
            ax.text(1.02, place, numbers, fontsize=8.5, va="center", transform=ax.get_yaxis_transform())
    ax.set_yticks(range(len(rows)), labels, fontsize=8.5)
    for label, row in zip(ax.get_yticklabels(), rows):
        label.set_fontweight("bold" if row is None else "normal")
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    ax.set_ylim(len(rows) - 0.4, -0.6)
    return ax


def strips(groups, ax=None):
    """A dot for each ratio of `groups`, {heading: {label: ratios}}, on a logarithmic axis, and a bar at each median.

    At the right stand the median, as percent above or below 1, and the number of ratios. Returns the Axes.
    """
    import matplotlib.pyplot as plt

    ax = plt.gca() if ax is None else ax
    labels = []
    for heading, rows in groups.items():
        labels.append((heading, "bold"))
        for label, ratios in rows.items():
            place, middle = len(labels), statistics.median(ratios)
            heights = [place + 0.6 * (i * 0.618 % 1 - 0.5) for i in range(len(ratios))]  # equal ratios lie side by side
            ax.plot(sorted(ratios), heights, "o", color=PALETTE[0], markersize=3, alpha=0.4)
            ax.vlines(middle, place - 0.42, place + 0.42, color=PALETTE[1], linewidth=2.5)
            numbers = f"{middle - 1:+.0%}  of {len(ratios)}"
            ax.text(1.02, place, numbers, fontsize=8.5, va="center", transform=ax.get_yaxis_transform())
            labels.append((label, "normal"))
    ax.axvline(1, color="#000000", linestyle=":", linewidth=1)
    ax.set_xscale("log")
    ax.set_xticks([0.3, 0.5, 0.7, 1, 1.4, 2], ["0.3", "0.5", "0.7", "1", "1.4", "2"])
    ax.minorticks_off()
    ax.set_yticks(range(len(labels)), [label for label, _ in labels], fontsize=8.5)
    for tick, (_, weight) in zip(ax.get_yticklabels(), labels):
        tick.set_fontweight(weight)
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    ax.set_ylim(len(labels) - 0.4, -0.6)
    return ax


def schedule(passes, ax=None, outlined=None):
    """The passes of a pipeline's ranks, a row for each: passes[rank] has (name, start, end) in ms, or in slots.

    Forward passes, F, are blue, backward passes, B, orange, and passes for the weights alone, W, green; those with a
    prime, of a rank's second stage, are pale. The passes of the micro-batch `outlined` have a black edge. Returns the
    Axes.
    """
    import matplotlib.pyplot as plt

    ax = plt.gca() if ax is None else ax
    begin = min(start for row in passes for _, start, _ in row)
    whole = max(end for row in passes for *_, end in row) - begin
    for rank, row in enumerate(passes):
        for name, start, end in row:
            left, width = start - begin, end - start
            (box,) = ax.barh(
                rank, width, left=left, height=0.9, color=PASSES[name[0]], edgecolor="white", linewidth=0.5
            )
            box.set_alpha(0.7 if name.endswith("'") else 1)
            if name[1:].rstrip("'") == str(outlined):
                box.set(edgecolor="black", linewidth=1.5, zorder=2)
            if width > whole / 50:  # or there is no room for its name
                ax.text(left + width / 2, rank, name, color="white", fontsize=6, ha="center", va="center")
    ax.set(yticks=range(len(passes)), ylabel="rank", ylim=(len(passes) - 0.4, -0.6))
    ax.grid(False)
    return ax


class LiveAccuracy:
    """Shows test accuracy while several runs train, one after another: `train(..., on_epoch=live.of(label))`.

    In a notebook one figure of all runs is redrawn after each epoch; elsewhere one line per epoch is printed.
    """

    def __init__(self):
        self.histories, self.display = {}, None

    def of(self, label):
        """What `train` calls after each epoch of the run `label`."""
        return partial(self.show, label)

    def show(self, label, history):
        self.histories[label] = history
        if notebook():
            self.redraw()
        else:
            from tqdm.auto import tqdm

            tqdm.write("{}: epoch {epoch}, test accuracy {test_accuracy:.3f}".format(label, **history[-1]))

    def redraw(self):
        from IPython.display import Image, display

        image = Image(accuracy_png(self.histories), alt=f"Test accuracy per epoch: {'; '.join(self.histories)}")
        if self.display is None:
            self.display = display(image, display_id=True)
        else:
            self.display.update(image)


def accuracy_png(histories):
    """`accuracy_curves` as the bytes of a PNG in the book's look, whatever look is in use."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(book_style()):
        figure, file = Figure(), io.BytesIO()  # no pyplot: the notebook would show the figure a second time
        accuracy_curves(histories, figure.subplots())
        figure.savefig(file, metadata={"Software": None})
    return file.getvalue()


def notebook():
    """Whether this is a Jupyter kernel, which can show figures."""
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


HOST_PARTS = {  # of a step, in the order of the program
    "next batch": "#D55E00",
    "copy": "#E69F00",
    "forward": "#0072B2",
    "zero_grad": "#CC79A7",
    "backward": "#882255",
    "optimizer step": "#000000",
}


def trace_steps(steps, figure=None):
    """Draw steps of the record "trace_resnet50", a panel for each: what the host does, and when the GPU is busy.

    Below stands for how many ms the GPU idles in a part, from 5 ms on. Returns the Axes. Without `figure` the current
    one is used, or a new one.
    """
    import matplotlib.pyplot as plt

    figure = plt.gcf() if figure is None else figure
    panels = figure.subplots(len(steps), sharex=True, squeeze=False)[:, 0]
    for ax, step in zip(panels, steps):
        for name, (start, end) in step["host"].items():
            ax.broken_barh([(start / 1e3, (end - start) / 1e3)], (0.6, 0.8), color=HOST_PARTS[name], linewidth=0)
        busy = [(start / 1e3, (end - start) / 1e3) for start, end in step["gpu"]]
        ax.broken_barh(busy, (-0.4, 0.8), color="#009E73", linewidth=0)  # an outline would fill the gaps
        for start, end in step["host"].values():
            idle = end - start - sum(max(0, min(end, stop) - max(start, begin)) for begin, stop in step["gpu"])
            if idle > 5000:
                ax.text((start + end) / 2e3, -0.7, f"{idle / 1e3:.0f}", ha="center", va="center", fontsize=8.5)
        ax.axvline(step["microseconds"] / 1e3, color="#999999", linewidth=1, linestyle="-")
        ax.set(yticks=[0, 1], yticklabels=["GPU", "host"], title=f"{step['workers']} workers", ylim=(-1, 1.6))
        ax.grid(axis="y", visible=False)
    panels[-1].set_xlabel("milliseconds from the beginning of the step (measured)")
    patches = [plt.Rectangle((0, 0), 1, 1, color=color) for color in HOST_PARTS.values()]
    figure.legend(patches, HOST_PARTS, loc="outside lower center", ncols=3)
    return panels


def log_panels(curves, xlabel, ylabel, figure=None):
    """Draw curves {title: {label: (xs, ys, lows, highs)}}, a panel for each title, on logarithmic axes that they share.

    A shaded band reaches from lows to highs. Ticks of x are at the xs. Returns the Axes. Without `figure` the current
    one is used, or a new one.
    """
    import matplotlib.pyplot as plt

    figure = plt.gcf() if figure is None else figure
    panels = figure.subplots(1, len(curves), sharex=True, sharey=True, squeeze=False)[0]
    for ax, (title, lines) in zip(panels, curves.items()):
        for label, (xs, ys, lows, highs) in lines.items():
            (line,) = ax.plot(xs, ys, marker="o", label=label)
            ax.fill_between(xs, lows, highs, color=line.get_color(), alpha=0.15, linewidth=0)
        ax.set(title=title, xlabel=xlabel, xscale="log", yscale="log")
        ax.set_xticks(xs, [f"{x:g}" if i % 2 == 0 else "" for i, x in enumerate(xs)])
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
    panels[0].set_ylabel(ylabel)
    panels[0].legend()
    return panels
