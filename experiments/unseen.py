"""LeNet with two batch sizes that the grid leaves out: what the reader's prediction in chapter 7 is checked against.

    python -m experiments.unseen

writes mgpu_lib/recorded/unseen.json. The runs are those of the grid, `experiments.tuning`: the same program, seeds
and images, and the same two budgets. Of its learning rates it takes the five in the middle, around the best.
"""

from experiments import study, tuning, tuning_runs

NET, BATCH_SIZES, SEEDS = "lenet", (32, 512), tuning.SEEDS
LRS = tuning.learning_rates(256)[2:-2]
SAMPLE, TOLERANCE = {"512/0.16/0": tuning.SHORT}, tuning.TOLERANCE


def cases():
    """{key: (batch_size, lrs, seed)}: key batch_size/smallest rate/seed, one seed after the other."""
    return {
        f"{batch_size}/{lrs[0]}/{seed}": (batch_size, lrs, seed)
        for seed in SEEDS
        for batch_size in BATCH_SIZES
        for lrs in tuning.stacks(batch_size, LRS)
    }


def record(batch_size, lrs, seed, epochs=tuning.EPOCHS, steps=tuning.STEPS):
    """The runs of these learning rates, trained at once, as the file of the grid holds them."""
    return [
        tuning.packed((NET, batch_size, seed), run)
        for run in tuning_runs.train_runs(
            NET, batch_size, lrs, seed, tuning.fashion_mnist(), tuning.VALIDATION, epochs, steps
        )
    ]


def recipe():
    return {
        "net": NET,
        "validation": tuning.VALIDATION,
        "epochs": tuning.EPOCHS,
        "steps": tuning.STEPS,
        "learning_rates": LRS,
    }


def summary(runs):
    """Nothing: what the runs say is read as the grid is, see `mgpu_lib.evidence.unseen`."""
    return {}


if __name__ == "__main__":
    study.run("unseen", cases(), record, recipe(), summary)
