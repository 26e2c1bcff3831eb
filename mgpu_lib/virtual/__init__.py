"""GPUs made of CPU memory. Imports nothing from the rest of the library: it can test anybody's multi-GPU code.

This is its public face: nobody outside imports from the modules below, except the programs that fit the clock.
"""

from mgpu_lib.virtual.clock import off_the_clock
from mgpu_lib.virtual.costs import pipeline_seconds, ring_seconds, round_seconds
from mgpu_lib.virtual.dry import Prediction, dry_run
from mgpu_lib.virtual.files import replacing
from mgpu_lib.virtual.inheriting import Setup, handed_down
from mgpu_lib.virtual.machine import Machine
from mgpu_lib.virtual.nccl import all_reduce_by_way, collective_seconds
from mgpu_lib.virtual.nests import tensors_in
from mgpu_lib.virtual.reporting import gather_timeline
from mgpu_lib.virtual.running import current
from mgpu_lib.virtual.specs import GPUS, LINKS, find_gpu, find_link
from mgpu_lib.virtual.tensor import is_virtual
from mgpu_lib.virtual.timeline import Timeline

virtual_gpus = Machine

__all__ = [
    "GPUS",
    "LINKS",
    "Machine",
    "Prediction",
    "Setup",
    "Timeline",
    "all_reduce_by_way",
    "collective_seconds",
    "current",
    "dry_run",
    "find_gpu",
    "find_link",
    "gather_timeline",
    "handed_down",
    "is_virtual",
    "off_the_clock",
    "pipeline_seconds",
    "replacing",
    "ring_seconds",
    "round_seconds",
    "tensors_in",
    "virtual_gpus",
]
