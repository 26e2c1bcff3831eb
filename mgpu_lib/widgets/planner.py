"""The planner: what a large training run takes, for any way to split it over thousands of GPUs."""

import inspect

import traitlets

from mgpu_lib import plan_formulas, planning
from mgpu_lib.plan_rates import NODES, constants
from mgpu_lib.widgets.base import CSS, HERE, InteractiveFigure, module
from mgpu_lib.widgets.javascript import javascript

FORMULAS = javascript(inspect.getsource(plan_formulas))
TOKENS = (1e11, 3e11, 1e12, 3e12, 1.5e13)  # to train on, as offered
OFFERED = planning.CHOICES | {"tokens": TOKENS}
SPLIT = "tensor", "pipeline", "zero", "micro_batch", "recompute"
JOB = "layers", "width", "heads", "seq_len", "batch_tokens", "gpu", "n_gpus", "network"


class Planner(InteractiveFigure):
    """Memory and time of a large training run: a model like Llama 3, the GPUs, and how the one is split over them.

    The values are those of OFFERED; `tokens` is the number to train on.
    Raises TraitError for others. Values that don't go together are no error: the figure says what is wrong.
    """

    _esm = module("planner.js", plan_formulas=FORMULAS)
    _css = CSS + (HERE / "planner.css").read_text(encoding="utf-8")
    controls = (*JOB, *SPLIT, "tokens")
    layers = traitlets.Int(80).tag(sync=True)
    width = traitlets.Int(8192).tag(sync=True)
    heads = traitlets.Int(64).tag(sync=True)
    seq_len = traitlets.Int(8192).tag(sync=True)
    batch_tokens = traitlets.Int(2**23).tag(sync=True)
    gpu = traitlets.Unicode("H100").tag(sync=True)
    n_gpus = traitlets.Int(512).tag(sync=True)
    network = traitlets.Unicode("InfiniBand NDR").tag(sync=True)
    tensor = traitlets.Int(8).tag(sync=True)
    pipeline = traitlets.Int(1).tag(sync=True)
    zero = traitlets.Int(1).tag(sync=True)
    micro_batch = traitlets.Int(1).tag(sync=True)
    recompute = traitlets.Bool(True).tag(sync=True)
    tokens = traitlets.Float(1.5e13).tag(sync=True)
    caption = traitlets.Unicode(
        "What one GPU of a large training run holds at its fullest moment, and where the time of a step goes. Change "
        "how the run is split and watch one bar shrink while the other grows. Plan up to the dashed line only: real "
        "runs typically held 1.4 times what is counted here. All times are modelled, by formulas that were held "
        "against dry runs in sixty settings; a table in the appendix says how far they are off."
    ).tag(sync=True)

    def __init__(self, **values):
        super().__init__(data=planner_data(), **values)

    @traitlets.validate(*controls)
    def _known(self, proposal):
        name, value = proposal["trait"].name, proposal["value"]
        known = OFFERED[name]
        if value not in known:
            raise traitlets.TraitError(f"{name}={value!r}: choose one of {', '.join(map(repr, known))}")
        return known[known.index(value)]

    def plan(self):
        """The `planning.Plan` of the values chosen now. ValueError for a split that there can't be."""
        return planning.plan(planning.run_of(**{name: getattr(self, name) for name in (*JOB, *SPLIT)}))


def planner_data():
    """What the formulas know, for the page: OFFERED, and `plan_rates.constants`.

    "nodes" {GPU: the machine it comes in}; "kernels" {GPU: its constants}; "collectives" {machine: {network: those of
    groups of GPUs}}.
    """
    kernels, collectives = {}, {}
    for gpu, node in NODES.items():
        rates = {network: dict(constants(gpu, network)) for network in OFFERED["network"]}
        collectives[node] = {network: known.pop("collectives") for network, known in rates.items()}
        kernels[gpu] = rates[OFFERED["network"][0]]
    choices = {name: list(values) for name, values in OFFERED.items()}
    return {"choices": choices, "nodes": NODES, "kernels": kernels, "collectives": collectives}
