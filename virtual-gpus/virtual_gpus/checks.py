"""Assertions for anybody's multi-GPU program: each raises an AssertionError that says what is wrong and where to look.

A *replica* is a module, a dict of tensors, or a list of tensors: one GPU's copy of the network. Everything works on
real GPUs, virtual GPUs and CPUs. Put them into your tests, or for some steps into your training loop.
A check that could not fail raises ValueError: there are fewer than two replicas, or nothing in them to look at.
Where each GPU has a process of its own, `from_all_ranks` makes the list that a check takes, on every rank.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from virtual_gpus.compat import tree_map_only
from virtual_gpus.tensors.tensor import is_virtual

Replica: TypeAlias = nn.Module | dict[str, torch.Tensor] | Sequence[torch.Tensor]
Numbers: TypeAlias = torch.Tensor | Sequence


def from_all_ranks(mine: Any) -> list:
    """A list of what each rank has passed as `mine`, for the checks: call it on all ranks; all get the same list.

    `mine` may hold tensors, in dicts, lists and tuples; they come detached, on the CPU. It's also anything that can be
    pickled, such as row numbers. Each rank needs memory for all of them. Raises TypeError for a module.
    """
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, on_cpu(mine))
    return everybody


def assert_replicas_equal(replicas: Iterable[Replica], atol: float = 0.0) -> None:
    """All `replicas` have the same parameters as the first, to `atol`; after each step, when all took the same one."""
    assert_equal_by_name(
        [tensors(replica) for replica in two_or_more(replicas)],
        atol,
        "Before training: did they start from the same numbers? After a step: did the reduced "
        "gradients reach every GPU, and before it stepped?",
    )


def assert_buffers_equal(replicas: Iterable[Replica], atol: float = 0.0) -> None:
    """All modules `replicas` have the same buffers as the first, such as batch norm's running means.

    Dicts and lists don't say which of their tensors are buffers: all are compared.
    """
    assert_equal_by_name(
        [
            dict(replica.named_buffers()) if isinstance(replica, nn.Module) else tensors(replica)
            for replica in two_or_more(replicas)
        ],
        atol,
        "No gradient reaches a buffer, so no all-reduce of gradients does either: copy replica 0's "
        "to the others, average them, or, with a process per GPU, use nn.SyncBatchNorm.",
    )


def assert_draws_agree(draws: Iterable[Numbers]) -> None:
    """What each GPU drew at random (a dropout mask, an order of the rows), one tensor per GPU, is the same for all."""
    drawn = [torch.as_tensor(draw) for draw in two_or_more(draws, "draw")]
    if not any(draw.numel() for draw in drawn):
        raise ValueError("no GPU drew anything: there is nothing to compare")
    first, *others = (draw.tolist() for draw in drawn)
    for gpu, draw in enumerate(others, start=1):
        fail_if(
            draw != first,
            f"GPU {gpu} drew different random numbers from GPU 0. Give all GPUs one seed for what they must share.",
        )


def assert_draws_differ(draws: Iterable[Numbers]) -> None:
    """No two of `draws` are the same: what GPUs drew at random for their own rows, or the orders of several epochs.

    Each is a tensor or a sequence of numbers, long enough that chance alone won't make two of them equal.
    """
    draws = [torch.as_tensor(draw).tolist() for draw in two_or_more(draws, "draw")]
    for number, draw in enumerate(draws):
        first = draws.index(draw)
        fail_if(
            first < number,
            f"draw {number} is the same as draw {first}. If GPUs drew them, give each GPU a seed of its own for "
            "its own rows. If epochs did, call sampler.set_epoch(epoch) before each.",
        )


def assert_no_aliasing(replicas: Iterable[Replica]) -> None:
    """No two tensors of different `replicas` share memory."""
    spans = {}  # for each storage: what bytes of it belong to which tensor of which replica
    named = [tensors(replica, buffers=True) for replica in two_or_more(replicas)]
    need_tensors(named)
    for number, replica in enumerate(named):
        for name, tensor in replica.items():
            start, end = span(tensor)
            others = spans.setdefault(memory_of(tensor), [])
            for first, last, owner, other in others:
                fail_if(
                    owner != number and max(start, first) < min(end, last),
                    f"{name!r} of replica {number} is the same memory as {other!r} of replica {owner}, on "
                    f"{tensor.device}: there are fewer copies than replicas. `.to(device)` copies only when the "
                    "tensor is on another device; write `.to(device, copy=True)`, or clone first.",
                )
            others.append((start, end, number, name))


def assert_gradients_fresh(replicas: Iterable[Replica]) -> None:
    """No parameter of `replicas` has a gradient other than zero; call it when a step is over, or before a backward.

    Raises ValueError for a replica without anything that takes a gradient, such as a state_dict.
    """
    named = [tensors(replica) for replica in replicas]
    if not named:
        raise ValueError("0 replicas: pass one or more")
    for number, replica in enumerate(named):
        if not any(tensor.requires_grad for tensor in replica.values()):
            raise ValueError(
                f"no tensor of replica {number} takes a gradient: pass modules or parameters; a "
                "state_dict holds detached tensors"
            )
        for name, tensor in replica.items():
            fail_if(
                tensor.grad is not None and bool((tensor.grad != 0).any()),
                f"{name!r} of replica {number} still has a gradient, and the next backward will add to it. Zero "
                "the gradients of every replica once per step: p.grad = None, or optimizer.zero_grad().",
            )


def assert_step_matches_single_device(before: Replica, after: Replica, expected: Replica, rtol: float = 1e-4) -> None:
    """From the parameters `before` to `after` is the step that one device takes: from `before` to `expected`.

    Each of the three is a replica. Take two steps or more on batches that don't divide evenly: stale gradients show
    from the second step on. The difference may be `rtol` of the step's length, and four roundings of the parameters.
    Raises ValueError for a step less than ten times as long as these. Whole numbers, such as counters, take no step.
    """
    replicas = [tensors(replica) for replica in (before, after, expected)]
    if any(replica.keys() != replicas[0].keys() for replica in replicas):  # perhaps a list beside a module
        replicas = [tensors(replica.values()) for replica in replicas]
    assert_same_shapes(replicas, ["`before`", "`after`", "`expected`"])
    steps = {name: p.dtype for name, p in replicas[0].items() if p.is_floating_point() or p.is_complex()}
    if not steps:
        raise ValueError(f"none of the {len(replicas[0])} tensors in `before` holds numbers that a step could change")
    start, ours, single = (torch.cat([numbers(replica[name]) for name in steps]) for replica in replicas)
    eps = max(torch.finfo(dtype).eps for dtype in steps.values())
    step, wanted = ours - start, single - start
    error, length = (step - wanted).norm(), wanted.norm()
    rounding = 4 * eps * start.norm()
    if length == 0:
        raise ValueError("`expected` equals `before`, with no step between: was `before` copied before the step?")
    if length <= 10 * rounding:
        raise ValueError(
            f"the step from `before` to `expected` is {length:.2g} long, and rounding the parameters takes up to "
            f"{rounding:.2g}: a wrong step could pass. Compare in 64 bits, or take more or longer steps"
        )
    if error <= rtol * length + rounding:
        return
    ratio, cosine = step.norm() / length, nn.functional.cosine_similarity(step, wanted, dim=0)
    advice = "Are the gradients of all GPUs in it, of this step only, and all rows with one weight?"
    if cosine > 0.95 and abs(ratio - 1) > 0.1:
        advice = "What are loss and gradients divided by: shard or batch, once or twice? Or is an old gradient in it?"
    raise AssertionError(
        f"the step differs from a single device's by {error / length:.2g} of its length: it is {ratio:.2f} "
        f"times as long, and the cosine of the angle between them is {cosine:.2f}. {advice}"
    )


def assert_every_row_once(rows: Iterable[Numbers], total: int) -> None:
    """Of the rows 0 … total - 1 each was used once. `rows` holds one sequence of row numbers per GPU or batch.

    >>> assert_every_row_once([[0, 2], [1, 2]], total=4)
    Traceback (most recent call last):
    AssertionError: of 4 rows 1 were never used (3), and 1 more than once (2). Do all GPUs cut ...
    """
    if total < 1:
        raise ValueError(f"total is {total}: there are no rows to use")
    seen = Counter(int(row) for part in rows for row in part)
    never = [row for row in range(total) if row not in seen]
    often = [row for row, times in seen.items() if times > 1]
    strange = [row for row in seen if not 0 <= row < total]
    fail_if(strange, f"there is no row{some(strange)} among the {total}")
    fail_if(
        never or often,
        f"of {total} rows {len(never)} were never used{some(never)}, and {len(often)} more than once{some(often)}. "
        "Do all GPUs cut the same shuffled order, and is it filled up with duplicates?",
    )


def assert_mean_over_rows(reported: float | torch.Tensor, parts: Iterable[Numbers], rtol: float = 1e-5) -> None:
    """The number `reported` is the mean over all rows. `parts` holds one tensor per GPU: a value for each of its rows.

    A value is a loss, say, or whether the answer was right. That no row is in two parts, `assert_every_row_once` says.
    Raises ValueError when there are no rows.
    """
    values = [torch.as_tensor(part).detach().cpu().flatten() for part in two_or_more(parts, "part")]
    values = [part.to(torch.promote_types(part.dtype, torch.float64)) for part in values]
    sizes, rows = [len(part) for part in values], torch.cat(values)
    if len(rows) == 0:
        raise ValueError(f"none of the {len(values)} parts has a row: there is no mean")
    mean, reported = rows.mean().item(), float(reported)
    fail_if(
        not abs(reported - mean) <= rtol * abs(mean),  # NaN fails, too
        f"{reported:.6g} was reported, but the mean over all {len(rows)} rows is {mean:.6g}. The GPUs have "
        f"{', '.join(map(str, sizes))} rows: is it a mean of their means? Add up over all GPUs, and divide once.",
    )


def assert_one_rank_saves(save: Callable[[str], Any]) -> None:
    """`save(path)`, which all ranks call, writes on exactly one of them; call the check on all ranks, too.

    Each rank passes a path of its own, in a temporary folder. Not for checkpoints of which every rank writes a part.
    """
    with tempfile.TemporaryDirectory() as folder:
        save(str(Path(folder, "checkpoint")))
        wrote = from_all_ranks(any(Path(folder).iterdir()))
    writers = [rank for rank, written in enumerate(wrote) if written]
    fail_if(
        len(writers) != 1,
        f"of {len(wrote)} ranks {len(writers)} wrote a file{some(writers)}. Under one name, the last to write wins, or "
        "the file is a mixture: save on rank 0 only, and let the others wait until it is done.",
    )


def assert_every_gpu_works(step: Callable[[], Any], devices: Sequence[torch.device | str]) -> None:
    """One call of `step()` uses memory on each of the `devices`. ValueError for a CPU, whose memory isn't counted."""
    devices = list(devices)
    if not devices or any(torch.device(device).type != "cuda" for device in devices):
        raise ValueError(f"devices are {devices}: pass GPUs, real or virtual; nothing counts a CPU's memory")
    before = {}
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
        before[device] = torch.cuda.memory_allocated(device)
    step()
    idle = [str(device) for device in devices if torch.cuda.max_memory_allocated(device) == before[device]]
    fail_if(
        idle,
        f"{', '.join(idle)} did nothing in this step. Did you call the network that you wrapped, and not the wrapper?",
    )


def assert_equal_by_name(replicas: list[dict], atol: float, advice: str) -> None:
    """Each dict of tensors in `replicas` has the names and, to `atol`, the values of the first."""
    need_tensors(replicas)
    assert_same_shapes(replicas, [f"replica {number}" for number in range(len(replicas))])
    for number, replica in enumerate(replicas):
        gaps = {name: largest_gap(tensor, replicas[0][name]) for name, tensor in replica.items()}
        wrong = {name: gap for name, gap in gaps.items() if gap > atol}
        if wrong:
            name, gap = next(iter(wrong.items()))
            raise AssertionError(
                f"replica {number} differs from replica 0 in {len(wrong)} of {len(gaps)} tensors; the "
                f"first is {name!r}, by up to {gap:.2g}. {advice}"
            )


def assert_same_shapes(replicas: list[dict], called: list[str]) -> None:
    """Each dict of tensors in `replicas` has the names and shapes of the first, and no NaN, with which nothing agrees.

    `called` says what to call them.
    """
    for replica, title in zip(replicas, called, strict=True):
        for name in {**replicas[0], **replica}:
            ours, first = (shape(r[name]) if name in r else "missing" for r in (replica, replicas[0]))
            fail_if(
                ours != first,
                f"{title} and {called[0]} differ in the names or shapes of their tensors: {name!r} "
                f"is {ours} and {first}",
            )
    for replica, title in zip(replicas, called, strict=True):
        for name, tensor in replica.items():
            fail_if(tensor.isnan().any(), f"{title} holds NaN in {name!r}")


def on_cpu(value: Any) -> Any:
    """`value` with each tensor in it detached and on the CPU."""
    return tree_map_only((nn.Module, torch.Tensor), one_on_cpu, value)


def one_on_cpu(value: Any) -> torch.Tensor:
    if isinstance(value, nn.Module):
        raise TypeError(
            f"a {type(value).__name__} is a module, and the checks want to know which of its tensors: pass "
            "dict(net.named_parameters()), dict(net.named_buffers()) or net.state_dict()"
        )
    return value.detach().cpu()


def two_or_more(replicas: Iterable, what: str = "replica") -> list:
    replicas = list(replicas)
    if len(replicas) < 2:
        raise ValueError(f"{len(replicas)} {what}{'s' * (not replicas)}: pass two or more, there is nothing to compare")
    return replicas


def need_tensors(replicas: list[dict]) -> None:
    if not any(replicas):
        raise ValueError(
            f"none of the {len(replicas)} replicas has a tensor to look at. Was net.parameters() passed after an "
            "optimizer had read it? It can be read once: pass the module, or list(net.parameters())"
        )


def largest_gap(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = numbers(a), numbers(b)
    return torch.where(a == b, 0.0, (a - b).double()).abs().max().item() if len(a) else 0.0  # infinity - infinity: NaN


def tensors(replica: Any, buffers: bool = False) -> dict[str, torch.Tensor]:
    """A replica's parameters by name, or all its tensors."""
    if isinstance(replica, nn.Module):
        return dict(replica.named_parameters()) | (dict(replica.named_buffers()) if buffers else {})
    return dict(replica) if isinstance(replica, dict) else {f"parameter {i}": t for i, t in enumerate(replica)}


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers, two for a complex one, in a row on the CPU; none is rounded: in float64, or in int64."""
    tensor = tensor.detach().cpu().resolve_conj()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.flatten().to(torch.float64 if tensor.is_floating_point() else torch.int64)


def shape(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}{' complex' * tensor.is_complex()}"


def memory_of(tensor: Any) -> tuple[torch.device, int]:
    """What tells the storage that holds a tensor from all others."""
    storage = (tensor.inner if is_virtual(tensor) else tensor).untyped_storage()
    return tensor.device, storage.data_ptr() or storage._cdata  # on "meta" no storage has an address


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor lies, (start, end); equal when it has no numbers."""
    start = tensor.storage_offset() * tensor.element_size()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (steps + 1) * tensor.element_size() if tensor.numel() else start


def some(rows: Sequence) -> str:
    return f" ({', '.join(map(str, rows[:3]))}{' …' * (len(rows) > 3)})" if rows else ""


def fail_if(wrong: Any, message: str) -> None:
    if wrong:
        raise AssertionError(message)
