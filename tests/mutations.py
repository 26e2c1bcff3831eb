"""Forty faults that a careless maintainer could make: does the suite notice each of them?

    python tests/mutations.py [NAME ...] [--tree FOLDER] [--out FILE.json]

Run by hand; pytest doesn't collect it. A fault is one small change, planted in a clone of the last commit of this
checkout (or of --tree) and taken out again. The tests that are likely to notice it run first; if they pass, so do their
slow cases, then all of their folders, then the quick chapters. A test that fails without the fault, too, doesn't count.
"""

import argparse
import json
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


class Fault(NamedTuple):
    name: str
    path: str
    old: str  # occurs once in the file
    new: str
    tests: str  # files of tests/, or virtual-gpus/tests/, where it is likely to be noticed


FAULTS = [
    Fault(
        "the update divides by the first shard's rows",
        "mgpu_lib/parallel.py",
        "update(params, lr, batch_size=len(X))",
        "update(params, lr, batch_size=len(X_shards[0]))",
        "library/test_parallel.py",
    ),
    Fault(
        "output_device=0 counts as none",
        "mgpu_lib/primitives.py",
        "home = device_ids[0] if output_device is None else output_device",
        "home = output_device or device_ids[0]",
        "library/test_primitives.py",
    ),
    Fault(
        "all chunks are as large as the first",
        "mgpu_lib/collectives.py",
        "(numbers // k + (chunk < numbers % k))",
        "-(-numbers // k)",
        "library/test_collectives.py",
    ),
    Fault(
        "what this rank has not used is unused on all",
        "mgpu_lib/ddp.py",
        "return {p for p, ranks in zip(self.names, used.tolist(), strict=True) if ranks}",
        "return set(self.used)",
        "library/test_from_scratch.py",
    ),
    Fault(
        "a second backward pass replaces the first one's gradients",
        "mgpu_lib/zero.py",
        "self.shard.grad = mean if self.shard.grad is None else self.shard.grad.add_(mean)",
        "self.shard.grad = mean",
        "library/test_from_scratch.py",
    ),
    Fault(
        "every part of a row-parallel layer keeps the bias",
        "mgpu_lib/tensor_parallel.py",
        "if dim == 1 and i > 0:",
        "if dim == 1 and i >= len(devices):",
        "library/test_tensor_parallel.py",
    ),
    Fault(
        "the last stages get the layers that are left over",
        "mgpu_lib/splitting.py",
        "size + (i < longer)",
        "size + (i >= num_stages - longer)",
        "library/test_splitting.py",
    ),
    Fault(
        "positions turn queries and keys the other way round",
        "mgpu_lib/transformer.py",
        "torch.cat([-second, first], dim=-1)",
        "torch.cat([second, -first], dim=-1)",
        "library/test_transformer.py",
    ),
    Fault(
        "LeNet starts from weights of half the variance",
        "mgpu_lib/models.py",
        "generator=generator) * (2 / inputs) ** 0.5",
        "generator=generator) * (1 / inputs) ** 0.5",
        "library/test_models.py",
    ),
    Fault(
        "every epoch has the same order",
        "mgpu_lib/data.py",
        "return chain.from_iterable(batches(X, y, batch_size, generator) for _ in count())",
        "return chain.from_iterable(batches(X, y, batch_size, generator.manual_seed(seed)) for _ in count())",
        "library/test_data.py library/test_training.py",
    ),
    Fault(
        "the loss is the mean since the training began",
        "mgpu_lib/training.py",
        "loss, total / rows)\n        total = rows = 0",
        "loss, total / rows)",
        "library/test_training.py",
    ),
    Fault(
        "uneven shards count as even for the gradient's noise",
        "mgpu_lib/tuning.py",
        "len(sizes) / sum(1 / size for size in sizes), rows)",
        "rows / len(sizes), rows)",
        "library/test_tuning.py",
    ),
    Fault(
        "neighbors in memory are taken for the same memory",
        "virtual-gpus/virtual_gpus/checks.py",
        "steps = sum((size - 1) * stride",
        "steps = sum(size * stride",
        "virtual/test_checks.py",
    ),
    Fault(
        "the ring's exercise is passed by whole tensors",
        "mgpu_lib/exercises/data_parallelism_from_scratch.py",
        "limit = 2 * (k - 1) * -(-numbers // k) * 4",
        "limit = 2 * (k - 1) * numbers * 4",
        "book/test_exercises.py",
    ),
    Fault(
        "the best learning rate is chosen by the test images",
        "mgpu_lib/evidence.py",
        "finals = [run.validation[budget] for run in runs]",
        "finals = [run.test[budget] for run in runs]",
        "library/test_evidence.py",
    ),
    Fault(
        "a predicted DistributedDataParallel has the smallest shard",
        "mgpu_lib/prediction.py",
        "torch.empty_like(X.tensor_split(k)[0], device",
        "torch.empty_like(X.tensor_split(k)[-1], device",
        "library/test_prediction.py",
    ),
    Fault(
        "the lowest rank that failed is blamed, not the first",
        "mgpu_lib/launching.py",
        "key=lambda rank: outputs[rank].written)",
        "key=lambda rank: rank)",
        "library/test_launching.py",
    ),
    Fault(
        "cells for the ranks always run in the notebook, too",
        "mgpu_lib/ranks.py",
        "    if line:\n        shell.run_cell(cell)",
        "    shell.run_cell(cell)",
        "library/test_ranks.py",
    ),
    Fault(
        "a table puts values into the page as they are",
        "mgpu_lib/table.py",
        "html.escape(str(v))",
        "str(v)",
        "library/test_evidence.py library/test_devices.py",
    ),
    Fault(
        "copies count as work of a GPU in the figure of a timeline",
        "mgpu_lib/widgets/events.js",
        'for (const item of lane.items) if (item.part !== "communication") found',
        "for (const item of lane.items) found",
        "figures/test_timeline.py",
    ),
    Fault(
        "two anchors of one name are no warning",
        "scripts/plain_markdown.py",
        'logger.warning("two anchors of one name: %s", name[1], location=opening)',
        "continue",
        "book/test_plain_markdown.py",
    ),
    Fault(
        "the example's epochs have one order",
        "examples/train_ddp.py",
        "sampler.set_epoch(epoch)",
        "sampler.set_epoch(0)",
        "examples/test_train_ddp.py",
    ),
    Fault(
        "any tensor of one number may come from the CPU",
        "virtual-gpus/virtual_gpus/tensors/arguments.py",
        "all(type(t) is Tensor and t.dim() == 0 and t.is_cpu for t in self.misplaced)",
        "all(type(t) is Tensor and t.numel() == 1 and t.is_cpu for t in self.misplaced)",
        "virtual/test_machine.py virtual/test_tensors.py virtual/test_ops.py",
    ),
    Fault(
        "a storage that is resized keeps its old memory, too",
        "virtual-gpus/virtual_gpus/memory/ledger.py",
        "self.ledger.allocate(nbytes)\n        self.ledger.free(before)",
        "self.ledger.allocate(nbytes)",
        "virtual/test_machine.py virtual/test_tensors.py library/test_from_scratch.py",
    ),
    Fault(
        "the peak is that of one pool",
        "virtual-gpus/virtual_gpus/memory/ledger.py",
        "now = small.allocated + large.allocated + size",
        "now = pool.allocated + size",
        "virtual/test_machine.py library/test_footprint.py",
    ),
    Fault(
        "the host doesn't wait for nonzero",
        "virtual-gpus/virtual_gpus/clock/clock.py",
        '"nonzero masked_select',
        '"masked_select',
        "virtual/test_clock.py",
    ),
    Fault(
        "kernels run in the default stream",
        "virtual-gpus/virtual_gpus/clock/clock.py",
        "stream = streams[0] if len(streams) == 1 else current_stream_of(gpu)",
        "stream = streams[0]",
        "virtual/test_clock.py",
    ),
    Fault(
        "copies over one link don't wait for each other",
        "virtual-gpus/virtual_gpus/clock/clock.py",
        "[stream.done_at for stream in streams] + [self.ports.get(port, 0.0) for port in ports]",
        "[stream.done_at for stream in streams]",
        "virtual/test_clock.py virtual/test_topology.py",
    ),
    Fault(
        "a convolution's backward pass always makes both gradients",
        "virtual-gpus/virtual_gpus/clock/work.py",
        "return sum(mask[:2]) * registered_flops",
        "return 2 * registered_flops",
        "virtual/test_costs.py virtual/test_clock.py",
    ),
    Fault(
        "half-filled nodes are taken for full ones",
        "virtual-gpus/virtual_gpus/clock/topology.py",
        "return [rank // per_node * self.machine_type.gpus + rank % per_node for rank in ranks]",
        "return list(ranks)",
        "virtual/test_topology.py virtual/test_nccl.py virtual/test_dry.py",
    ),
    Fault(
        "the mean over ranks is their sum",
        "virtual-gpus/virtual_gpus/ranks/gloo_collectives.py",
        "    if op == AVG:",
        "    if op == AVG and not result.is_floating_point():",
        "virtual/test_parallelism.py virtual/test_many_processes.py",
    ),
    Fault(
        "in a dry run a group's root is taken for a rank of the program",
        "virtual-gpus/virtual_gpus/ranks/collectives.py",
        "from_root.rootRank, source = root, group.members.ranks[root]",
        "from_root.rootRank, source = root, root",
        "virtual/test_dry.py",
    ),
    Fault(
        "in a dry run a sum is that of the ranks that are run",
        "virtual-gpus/virtual_gpus/constants.py",
        "return stacked.sum(0, dtype=stacked.dtype) * (size // len(constants))",
        "return stacked.sum(0, dtype=stacked.dtype)",
        "virtual/test_dry.py",
    ),
    Fault(
        "a number that a dry run doesn't know is true",
        "virtual-gpus/virtual_gpus/constants.py",
        '_DECISIONS = "bool float',
        '_DECISIONS = "float',
        "virtual/test_dry.py",
    ),
    Fault(
        "torch.rand on a GPU ignores the generator that it is given",
        "virtual-gpus/virtual_gpus/patches/factories.py",
        'kwargs["generator"] = generator or gpu.generator',
        'kwargs["generator"] = gpu.generator',
        "virtual/test_tensors.py virtual/test_machine.py virtual/test_surface.py",
    ),
    Fault(
        "autocast lowers doubles, too",
        "virtual-gpus/virtual_gpus/patches/autocast.py",
        "value.is_floating_point() and value.dtype != torch.float64",
        "value.is_floating_point()",
        "virtual/test_nn.py",
    ),
    Fault(
        "gather puts parts in the order of their GPUs",
        "virtual-gpus/virtual_gpus/patches/comm.py",
        "def put_together(tensors, total, dim):\n",
        "def put_together(tensors, total, dim):\n    tensors = sorted(tensors, key=lambda t: t.get_device())\n",
        "library/test_primitives.py library/test_dataparallel.py virtual/test_parallelism.py virtual/test_nn.py",
    ),
    Fault(
        "scatter cuts more evenly than PyTorch's",
        "virtual-gpus/virtual_gpus/patches/comm.py",
        "chunks = tensor.chunk(len(devices), dim) if",
        "chunks = tensor.tensor_split(len(devices), dim) if",
        "library/test_primitives.py library/test_dataparallel.py virtual/test_nn.py",
    ),
    Fault(
        "what is loaded comes to the current GPU",
        "virtual-gpus/virtual_gpus/patches/serialization.py",
        "gpu, held = find(location), storage",
        'gpu, held = find("cuda"), storage',
        "virtual/test_tensors.py virtual/test_files.py virtual/test_surface.py",
    ),
    Fault(
        "a dry run ends while its steps still keep more and more",
        "virtual-gpus/virtual_gpus/dry_runs/steps.py",
        "return allocated[0] == allocated[1] and math.isclose",
        "return math.isclose",
        "virtual/test_dry.py",
    ),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a fault's name; none: all faults")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="another checkout")
    parser.add_argument("--out", type=Path, help="where to write what was found, as JSON")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if not args.names or any(name in fault.name for name in args.names)]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "clone", "--quiet", "--shared", args.tree.resolve(), tree], check=True)
        for fault in chosen:
            start = time.monotonic()
            found[fault.name] = caught_by(fault, tree)
            print(f"{fault.name:60} {found[fault.name]}  ({time.monotonic() - start:.0f} s)", flush=True)
            if args.out:
                args.out.write_text(json.dumps(found, indent=1) + "\n")


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
    places = [place_of(name) for name in fault.tests.split()]
    likely = [place for place in places if (tree / place).exists()]
    if likely:
        yield likely, {}
        yield likely, {"MGPU_ALL": "1"}
    yield sorted({str(Path(place).parent) for place in places}), {}
    yield ["chapters"], {"nbval": "1"}


def place_of(name):
    folder, file = name.split("/")
    return f"virtual-gpus/tests/{file}" if folder == "virtual" else f"tests/{name}"


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
