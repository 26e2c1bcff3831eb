"""What training many learning rates at once saves the grid of `experiments.tuning`, side by side in one run.

    python -m benchmarks.vectorised

One ratio is the time that a step of one run takes in the book's own loop, over what it takes as one of a stack, as the
grid trains it: one compiled program, so many runs wide. Both on one thread, because the grid gives each core a part of
its own. Compiling, some 20 seconds for each batch size, is left out. The median of many is quoted.
"""

import statistics

import torch

from benchmarks.virtual_overhead import images, seconds
from experiments import study, tuning
from experiments.tuning_runs import stacked, start, stepper
from mgpu_lib.parallel import get_params, train_batch

PAIRS, MILLISECONDS = 12, 100  # of each program in a pair


def alone(X, y, steps):
    """`steps` steps of one run."""
    params, cpu = [get_params(start("lenet", 0)[0], "cpu")], [torch.device("cpu")]
    return lambda: [train_batch(X, y, params, cpu, lr=0.001) for _ in range(steps)]


def in_a_stack(X, y, width, steps):
    """`steps` steps of each run of a stack."""
    step, rates = stepper("lenet"), torch.full((width,), 0.001)
    params = stacked(start("lenet", 0)[0], width)

    def train():
        now = params
        for _ in range(steps):
            now, _, loss = step(now, [], X, y, rates)
            loss.tolist()  # the grid looks at each loss, and train_batch returns it

    return train


def main():
    study.set_up()
    print(f"torch {torch.__version__}; time per step and run, one run at a time over a stack: median (quartiles)")
    for batch_size in tuning.BATCH_SIZES:
        X, y = images(batch_size)
        width = tuning.WIDTH.get(batch_size, 1)
        one, stack = alone(X, y, 1), in_a_stack(X, y, width, 1)
        one(), stack()
        steps = max(1, round(MILLISECONDS / 1e3 / min(seconds(one) for _ in range(5))))
        one, stack = alone(X, y, steps), in_a_stack(X, y, width, steps)
        found = [width * seconds(one) / seconds(stack) for _ in range(PAIRS)]
        low, median, high = statistics.quantiles(found, n=4)
        print(f"batch {batch_size:4}, stacks of {width}: {median:5.2f} times as fast ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
