"""Checks for the book's exercises: `check_<name>(answer)` says what is right with an answer, or what is wrong."""

from mgpu_lib.exercises.batch_size_and_learning_rate import check_died_at, check_mended_comparison, check_seeds_needed
from mgpu_lib.exercises.clock import check_order_holds
from mgpu_lib.exercises.data_parallelism_from_scratch import (
    check_accuracy_of_each,
    check_is_wrong,
    check_ring_allreduce,
    check_uneven_weights,
)
from mgpu_lib.exercises.dataparallel import (
    check_broadcast_backward,
    check_find_dots,
    check_in_parallel,
    check_refused,
    check_row_losses,
    check_step_bytes,
    check_sync_batch_norm,
)
from mgpu_lib.exercises.distributeddataparallel import (
    check_best_cap,
    check_bucketed,
    check_mended_script,
    check_missing_rank,
)
from mgpu_lib.exercises.how_large_a_batch_pays import (
    check_best_batch,
    check_critical_batch,
    check_rescale,
    check_two_batch_noise,
)
from mgpu_lib.exercises.jobs_that_survive import check_minutes, check_resumable
from mgpu_lib.exercises.long_sequences_and_experts import (
    check_balanced,
    check_forward_bytes,
    check_hidden_from,
    check_rows_sent,
    check_squared_part,
    check_within_capacity,
)
from mgpu_lib.exercises.meet_your_gpus import (
    check_best_pair,
    check_break_even_ms,
    check_emptiest_gpu,
    check_visible_gpus,
)
from mgpu_lib.exercises.museum import check_clipped_step, check_gather_backward, check_own_bug, check_seed_of
from mgpu_lib.exercises.pipelines import check_best_cuts, check_one_f_one_b, check_step_time
from mgpu_lib.exercises.planning_a_run import (
    check_gpus_to_rent,
    check_page,
    check_straggler,
    check_tokens_to_hide,
)
from mgpu_lib.exercises.sharding import (
    check_fsdp_bytes,
    check_logged_norm,
    check_on_gradient,
    check_pieces,
    check_ranks_needed,
)
from mgpu_lib.exercises.tensor_parallelism import (
    check_norm_tokens,
    check_scatter_tokens,
    check_vocabulary_loss,
    check_where_to_look,
)
from mgpu_lib.exercises.tensors_on_devices import (
    check_aliases,
    check_copy_ms,
    check_to_device,
    check_weighted_step,
)
from mgpu_lib.exercises.what_fills_the_memory import (
    check_accumulate,
    check_cheapest,
    check_longest,
    check_mended_step,
    check_mlp_bytes,
)
from mgpu_lib.exercises.where_the_time_goes import (
    check_bottleneck,
    check_epoch_loss,
    check_first_to_fix,
    check_gain_without_host,
    check_step_seconds,
)

__all__ = [
    "check_accumulate",
    "check_accuracy_of_each",
    "check_aliases",
    "check_balanced",
    "check_best_batch",
    "check_best_cap",
    "check_best_cuts",
    "check_best_pair",
    "check_bottleneck",
    "check_break_even_ms",
    "check_broadcast_backward",
    "check_bucketed",
    "check_cheapest",
    "check_clipped_step",
    "check_copy_ms",
    "check_critical_batch",
    "check_died_at",
    "check_emptiest_gpu",
    "check_epoch_loss",
    "check_find_dots",
    "check_first_to_fix",
    "check_forward_bytes",
    "check_fsdp_bytes",
    "check_gain_without_host",
    "check_gather_backward",
    "check_gpus_to_rent",
    "check_hidden_from",
    "check_in_parallel",
    "check_is_wrong",
    "check_logged_norm",
    "check_longest",
    "check_mended_comparison",
    "check_mended_script",
    "check_mended_step",
    "check_minutes",
    "check_missing_rank",
    "check_mlp_bytes",
    "check_norm_tokens",
    "check_on_gradient",
    "check_one_f_one_b",
    "check_order_holds",
    "check_own_bug",
    "check_page",
    "check_pieces",
    "check_ranks_needed",
    "check_refused",
    "check_rescale",
    "check_resumable",
    "check_ring_allreduce",
    "check_row_losses",
    "check_rows_sent",
    "check_scatter_tokens",
    "check_seed_of",
    "check_seeds_needed",
    "check_squared_part",
    "check_step_bytes",
    "check_step_seconds",
    "check_step_time",
    "check_straggler",
    "check_sync_batch_norm",
    "check_to_device",
    "check_tokens_to_hide",
    "check_two_batch_noise",
    "check_uneven_weights",
    "check_visible_gpus",
    "check_vocabulary_loss",
    "check_weighted_step",
    "check_where_to_look",
    "check_within_capacity",
]
