"""GPUs for PyTorch made of a computer's memory: real values, counted memory, a modelled clock.

    from virtual_gpus import virtual_gpus

    with virtual_gpus(4) as machine:
        x = torch.ones(3, device="cuda:3")

What is listed here is public; nobody outside imports from the modules below, except the programs that fit the clock.
PyTorch is imported with the first of these names: the command line's help and pytest's plugin come without it.
"""

import importlib

HOMES = {
    "children": ["LaunchConfig", "child_environment"],
    "clock.host": ["off_the_clock"],
    "clock.costs": ["pipeline_seconds", "ring_seconds", "round_seconds"],
    "clock.nccl": ["all_reduce_by_algorithm", "collective_channels", "collective_seconds"],
    "clock.specs": ["GPUS", "LINKS", "find_gpu", "find_link"],
    "clock.timeline": ["Timeline"],
    "dry_runs.dry_run": ["Prediction", "dry_run"],
    "files": ["replacing"],
    "machine": ["Machine"],
    "report": ["gather_timeline"],
    "state": ["current"],
    "tensors.tensor": ["is_virtual"],
    "tree": ["tensors_in"],
}
MODULES = {name: module for module, names in HOMES.items() for name in names}
MODULES |= {"checks": "checks", "virtual_gpus": "machine"}
__all__ = sorted(MODULES)


def __getattr__(name):
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{MODULES[name]}")
    globals()[name] = module if name == "checks" else getattr(module, "Machine" if name == "virtual_gpus" else name)
    return globals()[name]
