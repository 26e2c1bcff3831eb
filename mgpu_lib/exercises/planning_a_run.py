"""Checks for "Plan a run on a thousand GPUs": how many GPUs, how many days, how often to save, what stays in a node."""

import itertools
import math

from mgpu_lib.exercises.framework import exercise, expect, filled
from mgpu_lib.exercises.sharding import LLAMA_70B
from virtual_gpus import GPUS

DAY = 86_400


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# How many GPUs


@exercise
def check_fewest_gpus(answer):
    """fewest_gpus(parameters, activations, memory, per_node): GPUs in whole nodes that hold 16 bytes per parameter."""
    cases = [(1000, 100, 600, 8), (1000, 100, 2100, 8), (1000, 0, 1000, 8), (1000, 0, 999, 8), (1000, 100, 600, 4)]
    cases += [(1000, 50, 70, 8), (1000, 600, 600, 8), (10**11, 10**10, 8 * 10**10, 8)]
    for given in cases:
        parameters, activations, memory, per_node = given
        got, right = filled(answer(*given)), whole_nodes(*given)
        case = f"{parameters:,} parameters, {activations:,} bytes of activations, {memory:,} bytes of memory"
        what = f"{case}, nodes of {per_node}: {got!r} instead of {right}"
        expect(got == right, f"{what}. {fewest_slip(got, *given)}")
    needed = answer(LLAMA_70B, 15 * 2**30, GPUS["H100"].memory, 8)
    return f"with 15 GiB of activations on each, {needed} H100 hold Llama 3 70B"


def whole_nodes(parameters, activations, memory, per_node):
    """The least multiple of per_node with 16 * parameters / n + activations <= memory, or infinity."""
    if activations >= memory:
        return math.inf
    return -(-16 * parameters // ((memory - activations) * per_node)) * per_node


def fewest_slip(got, parameters, activations, memory, per_node):
    """What may be wrong with a number of GPUs."""
    if activations >= memory:
        return "Activations alone fill every GPU, and more GPUs don't make them smaller: math.inf"
    if not is_number(got):
        return "Return a number"
    if got % per_node:
        return f"You rent whole nodes of {per_node} GPUs"
    if got == whole_nodes(parameters, 0, memory, per_node) and activations:
        return "Every GPU keeps its activations besides, however many GPUs there are"
    if got < whole_nodes(parameters, activations, memory, per_node):
        return "So many are too few: round up"
    return "Solve 16 * parameters / n + activations <= memory for n, and round up to whole nodes"


# How many days


@exercise
def check_training_days(answer):
    """training_days(parameters, tokens, n_gpus, peak, mfu): days that training takes if nothing fails."""
    cases = [(1e9, 2e10, 8, 1e15, 0.5), (7e10, 1.5e13, 1024, 989.4e12, 0.4), (65.2e9, 1.4e12, 2048, 312e12, 0.4764)]
    for given in cases:
        parameters, tokens, n_gpus, peak, mfu = given
        got, right = filled(answer(*given)), 6 * parameters * tokens / (n_gpus * peak * mfu) / DAY
        case = f"{parameters:.3g} parameters, {tokens:.3g} tokens, {n_gpus:,} GPUs of {peak:.3g} FLOP/s, {mfu:.0%} MFU"
        expect(is_number(got), f"{case}: {got!r}. Return a number of days")
        close = math.isclose(got, right, rel_tol=1e-6)
        expect(close, f"{case}: {got:.4g} instead of {right:.4g} days. {days_slip(got / right, n_gpus, mfu)}")
    return f"LLaMA 65B at 380 tokens per second on each of 2,048 A100 takes {answer(*cases[-1]):.1f} days"


def days_slip(ratio, n_gpus, mfu):
    """What may be wrong with a number of days that is `ratio` times the right one."""
    slips = {
        DAY: "These are seconds",
        24: "These are hours",
        1 / 3: "The backward pass has twice the FLOPs of the forward pass: six for each parameter and token, not two",
        mfu: "GPUs don't reach their peak: only a part of it, the MFU",
        mfu * mfu: "Divide by the MFU: the less of the peak is reached, the longer it takes",
        n_gpus: "The GPUs share the work",
    }
    found = [words for slip, words in slips.items() if math.isclose(ratio, slip, rel_tol=1e-3)]
    return found[0] if found else "Divide all FLOPs by those that all GPUs do in a second, and by 86,400 seconds a day"


# How often to save


@exercise
def check_best_interval(answer):
    """best_interval(write, hours, n_gpus): seconds between checkpoints, by Young's formula."""
    for write, hours, n_gpus in [(60, 50_000, 1024), (10, 50_000, 16_384), (30, 1000, 8), (120, 80_000, 1)]:
        got, right = filled(answer(write, hours, n_gpus)), math.sqrt(2 * write * hours * 3600 / n_gpus)
        case = f"{write} s to write, a failure of each GPU every {hours:,} hours, {n_gpus:,} GPUs"
        expect(is_number(got), f"{case}: {got!r}. Return seconds")
        close = math.isclose(got, right, rel_tol=1e-6)
        expect(close, f"{case}: {got:.4g} instead of {right:.4g} s. {interval_slip(got / right, n_gpus)}")
    return f"1,024 GPUs that need a minute to write save every {answer(60, 50_000, 1024) / 60:.0f} minutes"


def interval_slip(ratio, n_gpus):
    """What may be wrong with an interval that is `ratio` times the right one."""
    slips = {
        1 / 60: "Hours have to become seconds before the root is drawn",
        math.sqrt(n_gpus): "With n GPUs there are n times as many failures",
        n_gpus: "With n GPUs there are n times as many failures, so the time between two is divided by n",
        1 / math.sqrt(2): "Young's formula has a 2 below the root: on average half an interval is lost",
        1 / 3600: "These are hours",
    }
    found = [words for slip, words in slips.items() if math.isclose(ratio, slip, rel_tol=1e-6) and slip != 1]
    return found[0] if found else "It is the root of 2 * write * (seconds between two failures of the whole job)"


# What stays in a node

MESHES = (
    {"data": (32, 0.2, 0.1), "tensor": (8, 9.0, 1.0)},
    {"data": (8, 0.2, 0.1), "tensor": (8, 9.0, 1.0), "pipeline": (4, 0.3, 0.2)},
    {"data": (16, 4.0, 1.0), "tensor": (2, 3.0, 0.5), "context": (4, 2.0, 0.3)},
    {"data": (4, 5.0, 1.0), "tensor": (4, 3.0, 0.5), "context": (2, 2.8, 0.2)},
    {"data": (8, 5.0, 4.0), "tensor": (8, 4.5, 0.5)},
    {"data": (64, 0.5, 0.1), "tensor": (16, 20.0, 2.0)},
)


@exercise
def check_stays_in_node(answer):
    """stays_in_node(dimensions, per_node): names of the dimensions of a mesh that shouldn't cross nodes."""
    for dimensions in MESHES:
        right, got = least_exposed(dimensions, 8), filled(answer(dict(dimensions), 8))
        told = ", ".join(
            f"{name} of {n} ({far} s across, {near} s within)" for name, (n, far, near) in dimensions.items()
        )
        expect(isinstance(got, (set, frozenset, list, tuple)), f"{told}: {got!r}. Return a set of names")
        expect(set(got) <= set(dimensions), f"{told}: {sorted(map(str, got))} are not all names of dimensions")
        slip = placement_slip(set(got), right, dimensions, 8)
        expect(not slip, f"{told}: {sorted(got)} instead of {sorted(right)}. {slip}")
    return "six meshes lie on their nodes as well as they can"


def size(names, dimensions):
    return math.prod(dimensions[name][0] for name in names)


def exposed(names, dimensions):
    """Seconds of a step if the dimensions `names` stay in a node."""
    return sum(near if name in names else far for name, (_, far, near) in dimensions.items())


def least_exposed(dimensions, per_node):
    """The set of names that fits into a node, and leaves least exposed."""
    every = itertools.chain.from_iterable(itertools.combinations(dimensions, k) for k in range(len(dimensions) + 1))
    fitting = [set(names) for names in every if per_node % size(names, dimensions) == 0]
    return min(fitting, key=lambda names: exposed(names, dimensions))


def placement_slip(got, right, dimensions, per_node):
    """What is wrong with a set of names, or None."""
    if size(got, dimensions) > per_node:
        return f"Together they have {size(got, dimensions)} ranks, and a node has {per_node} GPUs"
    if per_node % size(got, dimensions):
        return f"{size(got, dimensions)} ranks don't divide the {per_node} GPUs of a node"
    least, said = exposed(right, dimensions), exposed(got, dimensions)
    if said > least + 1e-9:
        return f"Then {said:.3g} s are exposed, but it can be {least:.3g}: what counts is the time that a node saves"
    return None
