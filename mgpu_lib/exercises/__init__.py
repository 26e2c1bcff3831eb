"""Checks for the book's exercises: `check_<name>(answer)` says what is right with an answer, or what is wrong."""

from .allreduce import (
    check_accuracy_of_each,
    check_bucketed_allreduce,
    check_ring_allreduce,
    check_tree_allreduce,
    check_uneven_weights,
)
from .clock import (
    check_bottleneck,
    check_longest_gap,
    check_smallest_batch,
    check_step_seconds,
    check_workers_needed,
)
from .dataparallel import check_halve_every, check_strip_prefix, check_unwrap
from .devices import (
    check_aliases,
    check_emptiest_gpu,
    check_largest,
    check_physical,
    check_strays,
    check_to_device,
)
from .museum import check_clipped_step
from .primitives import check_broadcast_backward, check_gather_in_order, check_scatter_sizes, check_step_bytes
from .splitting import check_best_cut, check_bubble, check_linear_three_gpus, check_row_parallel
from .tuning import check_best_lr, check_critical_batch, check_diagnose, check_two_batch_noise

__all__ = ["check_accuracy_of_each", "check_aliases", "check_best_cut", "check_best_lr", "check_bottleneck",
           "check_broadcast_backward", "check_bubble", "check_bucketed_allreduce", "check_clipped_step",
           "check_critical_batch", "check_diagnose", "check_emptiest_gpu", "check_gather_in_order", "check_halve_every",
           "check_largest", "check_linear_three_gpus", "check_longest_gap", "check_physical", "check_ring_allreduce",
           "check_row_parallel", "check_scatter_sizes", "check_smallest_batch", "check_step_bytes",
           "check_step_seconds", "check_strays", "check_strip_prefix", "check_to_device", "check_tree_allreduce",
           "check_two_batch_noise", "check_uneven_weights", "check_unwrap", "check_workers_needed"]
