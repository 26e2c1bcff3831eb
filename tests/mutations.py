"""Forty faults that a careless maintainer could make: does the suite notice each of them?

    python tests/mutations.py [NAME ...] [--tree FOLDER]

Run by hand; pytest doesn't collect it. A fault is one small change, planted in a clone of the last commit of this
checkout (or of --tree) and taken out again. The tests that are likely to notice it run first; if they pass, so do their
slow cases, then all of their folders, then the quick chapters. A test that fails without the fault, too, doesn't count.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

UNCLEAR = "the time limit", "pytest itself, which fails"
LIMIT = 3600  # seconds for one run of pytest
FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?|\S+)(?: - .*)?$", re.MULTILINE)


# A fault's name; the file, and those of the tests that are likely to notice it (library/parallel is
# tests/library/test_parallel.py, virtual/ is the simulator's); the lines that stand there once, and what replaces them.
FAULTS = """
the update divides by the first shard's rows
    mgpu_lib/parallel.py: library/parallel
    - update(params, lr, batch_size=len(X))
    + update(params, lr, batch_size=len(X_shards[0]))
output_device=0 counts as none
    mgpu_lib/primitives.py: library/primitives
    - home = device_ids[0] if output_device is None else output_device
    + home = output_device or device_ids[0]
all chunks are as large as the first
    mgpu_lib/collectives.py: library/collectives
    - (numbers // k + (chunk < numbers % k))
    + -(-numbers // k)
what this rank has not used is unused on all
    mgpu_lib/ddp.py: library/from_scratch
    - return {p for p, ranks in zip(self.names, used.tolist(), strict=True) if ranks}
    + return set(self.used)
a second backward pass replaces the first one's gradients
    mgpu_lib/zero.py: library/from_scratch
    - self.shard.grad = mean if self.shard.grad is None else self.shard.grad.add_(mean)
    + self.shard.grad = mean
the loss of a cut vocabulary takes each rank's own maximum
    mgpu_lib/tensor_parallel.py: library/tensor_parallel
    - dist.all_reduce(most, dist.ReduceOp.MAX)
    + pass
the last stages get the layers that are left over
    mgpu_lib/splitting.py: library/splitting
    - size + (i < longer)
    + size + (i >= num_stages - longer)
positions turn queries and keys the other way round
    mgpu_lib/transformer.py: library/transformer
    - torch.cat([-second, first], dim=-1)
    + torch.cat([second, -first], dim=-1)
LeNet starts from weights of half the variance
    mgpu_lib/models.py: library/models
    - generator=generator) * (2 / inputs) ** 0.5
    + generator=generator) * (1 / inputs) ** 0.5
every epoch has the same order
    mgpu_lib/data.py: library/data library/training
    - return chain.from_iterable(batches(X, y, batch_size, generator) for _ in count())
    + return chain.from_iterable(batches(X, y, batch_size, generator.manual_seed(seed)) for _ in count())
the loss is the mean since the training began
    mgpu_lib/training.py: library/training
    - loss, total / rows)
    -         total = rows = 0
    + loss, total / rows)
uneven shards count as even for the gradient's noise
    mgpu_lib/tuning.py: library/tuning
    - len(sizes) / sum(1 / size for size in sizes), rows)
    + rows / len(sizes), rows)
neighbors in memory are taken for the same memory
    virtual-gpus/virtual_gpus/checks.py: virtual/checks
    - steps = sum((size - 1) * stride
    + steps = sum(size * stride
the ring's exercise is passed by whole tensors
    mgpu_lib/exercises/data_parallelism_from_scratch.py: book/exercises
    - limit = 2 * (k - 1) * -(-numbers // k) * 4
    + limit = 2 * (k - 1) * numbers * 4
the best learning rate is chosen by the test images
    mgpu_lib/evidence.py: library/evidence
    - finals = [run.validation[budget] for run in runs]
    + finals = [run.test[budget] for run in runs]
a predicted DistributedDataParallel has the smallest shard
    mgpu_lib/prediction.py: library/prediction
    - torch.empty_like(X.tensor_split(k)[0], device
    + torch.empty_like(X.tensor_split(k)[-1], device
the lowest rank that failed is blamed, not the first
    mgpu_lib/launching.py: library/launching
    - key=lambda rank: outputs[rank].written)
    + key=lambda rank: rank)
cells for the ranks always run in the notebook, too
    mgpu_lib/ranks.py: library/ranks
    -     if line:
    -         shell.run_cell(cell)
    +     shell.run_cell(cell)
a table puts values into the page as they are
    mgpu_lib/table.py: library/evidence library/devices
    - {html.escape(str(value))}
    + {value}
copies count as work of a GPU in the figure of a timeline
    mgpu_lib/widgets/events.js: figures/timeline
    - for (const item of lane.items) if (item.part !== "communication") found
    + for (const item of lane.items) found
two anchors of one name are no warning
    scripts/plain_markdown.py: book/plain_markdown
    - logger.warning("two anchors of one name: %s", name[1], location=opening)
    + continue
the example's epochs have one order
    examples/train_ddp.py: examples/train_ddp
    - sampler.set_epoch(epoch)
    + sampler.set_epoch(0)
any tensor of one number may come from the CPU
    virtual-gpus/virtual_gpus/tensors/arguments.py: virtual/refusals virtual/tensors virtual/ops
    - all(type(t) is Tensor and t.dim() == 0 and t.is_cpu for t in self.elsewhere)
    + all(type(t) is Tensor and t.numel() == 1 and t.is_cpu for t in self.elsewhere)
a storage that is resized keeps its old memory, too
    virtual-gpus/virtual_gpus/memory/ledger.py: virtual/machine virtual/tensors library/from_scratch
    - self.ledger.allocate(nbytes)
    -         self.ledger.free(before)
    + self.ledger.allocate(nbytes)
the peak is that of one pool
    virtual-gpus/virtual_gpus/memory/ledger.py: virtual/machine library/footprint
    - now = small.allocated + large.allocated + size
    + now = pool.allocated + size
the host doesn't wait for nonzero
    virtual-gpus/virtual_gpus/clock/clock.py: virtual/clock
    - "nonzero masked_select
    + "masked_select
kernels run in the default stream
    virtual-gpus/virtual_gpus/clock/clock.py: virtual/clock
    - stream = streams[0] if len(streams) == 1 else current_stream_of(gpu)
    + stream = streams[0]
copies over one link don't wait for each other
    virtual-gpus/virtual_gpus/clock/clock.py: virtual/clock virtual/topology
    - start = max(start, stream.done_at, self.ports.get(port, 0.0))
    + start = max(start, stream.done_at)
a convolution's backward pass always makes both gradients
    virtual-gpus/virtual_gpus/clock/work.py: virtual/costs virtual/clock
    - return sum(mask[:2]) * registered_flops
    + return 2 * registered_flops
half-filled nodes are taken for full ones
    virtual-gpus/virtual_gpus/clock/topology.py: virtual/topology virtual/nccl virtual/dry
    - return [rank // per_node * self.machine_type.gpus + rank % per_node for rank in ranks]
    + return list(ranks)
the mean over ranks is their sum
    virtual-gpus/virtual_gpus/ranks/gloo_collectives.py: virtual/parallelism virtual/many_processes
    -     if op == AVG:
    +     if op == AVG and not result.is_floating_point():
in a dry run a group's root is taken for a rank of the program
    virtual-gpus/virtual_gpus/ranks/collectives.py: virtual/dry
    - from_root.rootRank, source = root, group.members.ranks[root]
    + from_root.rootRank, source = root, root
in a dry run a sum is that of the ranks that are run
    virtual-gpus/virtual_gpus/constants.py: virtual/dry
    - return stacked.sum(0, dtype=stacked.dtype) * (size // len(constants))
    + return stacked.sum(0, dtype=stacked.dtype)
a number that a dry run doesn't know is true
    virtual-gpus/virtual_gpus/unknown.py: virtual/unknown virtual/dry
    - return bool(self.decide())
    + return True
torch.rand on a GPU ignores the generator that it is given
    virtual-gpus/virtual_gpus/patches/factories.py: virtual/tensors virtual/machine virtual/surface
    - kwargs["generator"] = generator or gpu.generator
    + kwargs["generator"] = gpu.generator
autocast lowers doubles, too
    virtual-gpus/virtual_gpus/patches/autocast.py: virtual/nn
    - value.is_floating_point() and value.dtype != torch.float64
    + value.is_floating_point()
gather puts parts in the order of their GPUs
    virtual-gpus/virtual_gpus/patches/comm.py: library/primitives library/equivalence virtual/parallelism virtual/nn
    - for part, t in zip(out_tensor.split
    + tensors = sorted(tensors, key=lambda t: t.get_device())
    +     for part, t in zip(out_tensor.split
scatter cuts more evenly than PyTorch's
    virtual-gpus/virtual_gpus/patches/comm.py: library/primitives library/equivalence virtual/nn
    - chunks = tensor.chunk(len(devices), dim) if
    + chunks = tensor.tensor_split(len(devices), dim) if
what is loaded comes to the current GPU
    virtual-gpus/virtual_gpus/patches/serialization.py: virtual/nn virtual/tensors virtual/surface
    - gpu, held = find(location), storage
    + gpu, held = find("cuda"), storage
a dry run ends while its steps still keep more and more
    virtual-gpus/virtual_gpus/dry_runs/steps.py: virtual/dry
    - return allocated[0] == allocated[1] and math.isclose
    + return math.isclose
"""


class Fault(NamedTuple):
    name: str
    path: str
    tests: list
    old: str
    new: str


def faults():
    for name, place, change in re.findall(r"^(\S.*)\n    (.+)\n((?:    [-+] .*\n)+)", FAULTS, re.MULTILINE):
        path, _, tests = place.partition(": ")
        old, new = ("\n".join(re.findall(rf"^    [{sign}] (.*)", change, re.MULTILINE)) for sign in "-+")
        yield Fault(name, path, [place_of(each) for each in tests.split()], old, new)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a fault's name; none: all faults")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="another checkout")
    args = parser.parse_args()
    chosen = [fault for fault in faults() if not args.names or any(name in fault.name for name in args.names)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "clone", "--quiet", "--shared", args.tree.resolve(), tree], check=True)
        for fault in chosen:
            start = time.monotonic()
            found = caught_by(fault, tree)
            print(f"{fault.name:60} {found}  ({time.monotonic() - start:.0f} s)", flush=True)


def caught_by(fault, tree):
    """The first test that fails with the fault in the tree and passes without it."""
    path = tree / fault.path
    right = path.read_text() if path.exists() else ""
    if right.count(fault.old) != 1:
        return f"DOES NOT APPLY: {right.count(fault.old)} times in {fault.path}"
    left_out = []
    for tests, options in runs(fault, tree):
        path.write_text(right.replace(fault.old, fault.new))
        while (failure := first_failure(tree, tests, options, left_out)) is not None:
            path.write_text(right)
            if failure in UNCLEAR or first_failure(tree, [alone(failure)], options, []) is None:
                return failure
            left_out.append(failure)
            path.write_text(right.replace(fault.old, fault.new))
        path.write_text(right)
    return "NOT CAUGHT"


def runs(fault, tree):
    """(tests, options of pytest) one after the other, each more than the one before."""
    likely = [place for place in fault.tests if (tree / place).exists()]
    if likely:
        yield likely, {}
        yield likely, {"MGPU_ALL": "1"}
    yield sorted({str(Path(place).parent) for place in fault.tests}), {}
    yield ["chapters"], {"nbval": "1"}


def place_of(name):
    folder, file = name.split("/")
    return f"virtual-gpus/tests/test_{file}.py" if folder == "virtual" else f"tests/{folder}/test_{file}.py"


def alone(failure):
    """What to run for this test only; a cell of a notebook takes those before it."""
    name, _, cell = failure.partition(".ipynb::")
    return f"{name}.ipynb" if cell else failure


def first_failure(tree, tests, options, left_out):
    """Its name, as pytest gives it; None if all pass."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}{os.pathsep}{tree}/virtual-gpus",
        "PYTHONDONTWRITEBYTECODE": "1",
        "CI": "",
        **options,
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    command += ["--nbval"] * ("nbval" in options or tests[0].startswith("chapters"))
    command += [part for name in left_out for part in ("--deselect", name)]
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        said = process.communicate(timeout=LIMIT)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        return UNCLEAR[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode in (0, 5):  # 5: nothing was collected
        return None
    failure = FIRST_FAILURE.search(said)
    return UNCLEAR[1] if failure is None else failure[1]


if __name__ == "__main__":
    main()
