"""How long a GPU takes for an operation, a copy, or a round of a collective operation.

A roofline for every kernel: it takes the longer of two times, that of its arithmetic and that of its memory traffic,
and a fixed time beside. The rates that a GPU reaches stand in `rates`.
"""

from typing import NamedTuple

from virtual_gpus.clock import rates
from virtual_gpus.clock.specs import GPU, Link
from virtual_gpus.clock.topology import Connection
from virtual_gpus.clock.work import Work

SLOWER_BACKWARD = ("conv1x1", "conv3x3", "conv", "conv_grouped", "conv_depthwise", "attention")


class Beside(NamedTuple):
    """How much longer kernels take beside a collective operation, as a part of their time: `part` of the
    multiprocessors that it takes for each that it leaves, but at least `waiting`."""

    part: float
    waiting: float


ALL = Beside(1.0, 0.0)


class Cost(NamedTuple):
    """What an operation costs on one kind of GPU, in seconds."""

    work: Work
    seconds: float  # of its kernels
    bound: str  # what those spend most of their time on: "compute", "memory" or "fixed"
    from_python: float  # of the host's time, called by Python
    from_cpp: float  # the same, called by autograd's engine, or by other C++
    beside: Beside = ALL  # how much longer its kernels take beside a collective operation


def cost(work: Work, spec: GPU, software: str = rates.NEWEST) -> Cost:
    """What `work` costs on a GPU with the data sheet `spec`, with the `software` of a year, a key of rates.SOFTWARE."""
    from_python, from_cpp = (rates.HOST[work.kind][i] + work.tensors * rates.HOST["tensor"][i] for i in (0, 1))
    if not work.kernels:
        return Cost(work, 0.0, "fixed", from_python, from_cpp)
    arithmetic = work.flops / rate(work, spec, software) if work.flops else 0.0
    traffic = work.nbytes / bandwidth(work.kind, spec)
    fixed, layout = work.kernels * rates.FIXED[work.kind], 0.0
    if on_tensor_cores(work, spec):
        fixed += work.layout_copies * rates.FIXED["layout"]
        layout = work.layout_nbytes / bandwidth("layout", spec)
    longest = max(arithmetic, traffic)
    bound = "fixed" if fixed > longest + layout else "compute" if arithmetic > traffic + layout else "memory"
    return Cost(work, fixed + longest + layout, bound, from_python, from_cpp, slowed_beside(work, spec))


def slowed_beside(work: Work, spec: GPU) -> Beside:
    """How much longer the kernels of `work` take beside a collective operation."""
    if work.kind in ("pointwise", "foreach"):
        return Beside(rates.POINTWISE_BESIDE, 0.0)
    if work.kind == "matmul" and spec.capability[0] >= 9 and on_tensor_cores(work, spec):
        return Beside(1.0, min(rates.MOST, rates.WAITING * rates.TILE * spec.sm_count / work.outputs))
    return ALL


def bandwidth(kind: str, spec: GPU) -> float:
    """Bytes per second that a GPU's memory reaches under a kernel of this kind."""
    return spec.bandwidth * min(1.0, rates.MEMORY[kind] * rates.FACTOR["memory"].get(rates.generation(spec), 1.0))


def on_tensor_cores(work: Work, spec: GPU) -> bool:
    return work.precision != "fp32" and getattr(spec, work.precision) is not None and work.kind in rates.TENSOR


def rate(work: Work, spec: GPU, software: str = rates.NEWEST) -> float:
    """FLOP per second that a GPU reaches. Few outputs don't fill its multiprocessors."""
    kind = f"{work.kind} backward" if work.kind in SLOWER_BACKWARD and work.name.endswith("backward") else work.kind
    group, throttled = rates.generation(spec), rates.FACTOR["low power"] if spec.power <= rates.LOW_POWER else 1.0
    if on_tensor_cores(work, spec) and work.kind == "attention":
        reached = getattr(spec, work.precision) * attention_part(work, group, software)
    elif on_tensor_cores(work, spec):
        factor = rates.FACTOR["products" if work.kind == "matmul" else "tensor cores"]
        reached = getattr(spec, work.precision) * min(1.0, rates.TENSOR[kind] * factor.get(group, 1.0))
    else:
        reached = spec.fp32 * rates.CORES[kind] * rates.FACTOR["cores"].get(group, 1.0)
    return throttled * reached * work.outputs / (work.outputs + rates.HALF * spec.sm_count)


def attention_part(work: Work, group: str, software: str) -> float:
    """The part of the tensor cores' peak that attention reaches on a generation of GPUs: less for short sequences."""
    kernels = [kernel for name, kernel in rates.SOFTWARE[software].items() if name in work.name]
    parts = rates.ATTENTION[kernels[0] if kernels else "FlashAttention 1"]  # assumed of the memory-efficient kernel
    part, half = parts["Hopper" if group in ("Hopper", "Blackwell") else "Ampere"]  # assumed of other generations
    # numbers that a query is compared with: it takes two products forward, and five backward
    length = work.flops / work.outputs / (5 if work.name.endswith("backward") else 2)
    return part * length / (length + half)


def link_seconds(nbytes: float, link: Link | Connection, kind: str) -> float:
    """Seconds that a copy of `nbytes` takes over `link`; its `kind` is a key of rates.COPY or rates.HOST_MEMORY."""
    if kind in rates.HOST_MEMORY:  # pinned memory comes between, which the host fills: the slower of two sets the pace
        return link.latency + nbytes / min(link.bandwidth * rates.COPY["pinned"], rates.HOST_MEMORY[kind])
    return link.latency + nbytes / (link.bandwidth * rates.COPY[kind])


def round_seconds(nbytes: float, link: Link) -> float:
    """Seconds of one round of a collective operation, in which every GPU sends at most `nbytes`."""
    return rates.ROUND + nbytes / (link.bandwidth * rates.COPY["collective"])


def ring_seconds(nbytes: float, k: int, link: Link) -> float:
    """Seconds of a ring all-reduce of `nbytes` on each of `k` GPUs: 2(k-1) rounds, in each a k-th on every link."""
    return 2 * (k - 1) * round_seconds(nbytes / k, link)


def pipeline_seconds(nbytes: float, k: int, link: Link) -> float:
    """Seconds of a broadcast or a reduction of `nbytes` among `k` GPUs in a chain, cut fine: every link is busy."""
    return (k - 2) * rates.ROUND + round_seconds(nbytes, link) if k > 1 else 0.0


def packing_seconds(nbytes: float, spec: GPU) -> float:
    """Seconds to copy tensors into one buffer on a GPU: every byte is read and written."""
    return 2 * nbytes / bandwidth("pointwise", spec)
