"""GPUs made of CPU memory. Imports nothing from the rest of the library: it can test anybody's multi-GPU code."""
from .machine import Machine, current
from .specs import GPUS, LINKS

virtual_gpus = Machine

__all__ = ["GPUS", "LINKS", "Machine", "current", "virtual_gpus"]
