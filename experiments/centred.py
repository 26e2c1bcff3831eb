"""How much of batch norm's effect do centred inputs have? LeNet without batch norm, the images' mean taken away.

    python -m experiments.centred

writes mgpu_lib/recorded/centred.json. Pixels lie between 0 and 1, so the images of the grid, `experiments.tuning`, are
all on one side of 0. These runs are those of the grid at one batch size, seed by seed, but for that.
"""

from experiments import study, tuning, tuning_runs

NET, BATCH_SIZE = "lenet", 256
LRS = tuning.learning_rates(BATCH_SIZE)[1:7]  # 0.01 to 1: at 2.5 and above no LeNet trains
SAMPLE, TOLERANCE = {"0.16/0": tuning.SHORT}, tuning.TOLERANCE


def cases():
    """{key: (lr, seed)}: key lr/seed, one seed after the other."""
    return {f"{lr}/{seed}": (lr, seed) for seed in tuning.SEEDS for lr in LRS}


def record(lr, seed, epochs=tuning.EPOCHS, steps=tuning.STEPS):
    """A run as the file of the grid holds it."""
    data, kept_out = tuning.fashion_mnist(), tuning.VALIDATION
    mean = data.X_train[: len(data.X_train) - kept_out].mean()
    data = data._replace(X_train=data.X_train - mean, X_test=data.X_test - mean)
    [run] = tuning_runs.train_runs(NET, BATCH_SIZE, [lr], seed, data, kept_out, epochs, steps)
    return tuning.packed((NET, BATCH_SIZE, seed), run)


def recipe():
    return {
        "validation": tuning.VALIDATION,
        "epochs": tuning.EPOCHS,
        "steps": tuning.STEPS,
    }


def summary(runs):
    """Nothing: what the runs say is read as the grid is, see `mgpu_lib.evidence.centred`."""
    return {}


if __name__ == "__main__":
    study.run("centred", cases(), record, recipe(), summary)
