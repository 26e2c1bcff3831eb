"""Hold the planner's formulas against dry runs, in sixty settings that a seed drew from the planner's own controls.

    python -m experiments.planner_validation

writes mgpu_lib/recorded/planner_validation.json: of each setting what a dry run of its program (planned_runs) says, and
what `mgpu_lib.planning` does. The settings were drawn, and this file was committed, before any of them had been run.
Later the planner came to refuse heads of more than 256 numbers, for which dry runs take slower attention, as CUDA does:
the 13 settings with such heads, whose formulas were up to 71% off, gave way to the next that the seed draws.

Of a step of many micro-batches two short ones are run: once a pipeline is full, each more of them takes as long.
"""

import random
import statistics

import mgpu_lib as mgpu
from experiments import planned_runs, study
from mgpu_lib import planning

SEED, SETTINGS = 13, 60


def settings():
    """The settings: of each control a value, as drawn; those that there can't be are drawn again."""
    draw, found = random.Random(SEED), []
    while len(found) < SETTINGS:
        drawn = {name: draw.choice(values) for name, values in planning.CHOICES.items()}
        if planning.fault(planning.run_of(**drawn)) is None and drawn not in found:
            found.append(drawn)
    return found


def cases():
    """{the setting in words: (the setting,)}, those that take least first."""

    def work(drawn):
        return drawn["layers"] * min(drawn["pipeline"] + 1, planning.run_of(**drawn).micro_batches)

    return {
        ", ".join(f"{name} {value}" for name, value in drawn.items()): (drawn,)
        for drawn in sorted(settings(), key=work)
    }


def recipe():
    return {"seed": SEED, "settings": SETTINGS}


def record(setting):
    """What dry runs say of a setting: seconds of a step, and bytes on the fullest GPU."""
    run = planning.run_of(**setting)
    few = run.pipeline, run.pipeline + 1
    if run.micro_batches <= few[1]:
        seconds, held = dry_run(run, run.micro_batches)
    else:
        (less, _), (more, held) = (dry_run(run, number) for number in few)
        seconds = more + (run.micro_batches - few[1]) * (more - less)
    return {"setting": setting, "seconds": seconds, "bytes": held}


def dry_run(run, micro_batches):
    """(seconds of a step of so many micro-batches, the most bytes on a GPU)."""
    peaks, program = {}, planned_runs.program
    made = mgpu.dry_run(program(run, micro_batches, peaks), run.n_gpus, run.gpu, 8, None, run.network)
    return made.seconds, max(map(max, peaks.values()))


def summary(runs):
    """What the formulas say of each, how much too large that is, and the errors of all."""
    rows = {name: compared(found) for name, found in runs.items()}
    return {"rows": rows} | {what: errors([row[what]["error"] for row in rows.values()]) for what in ("time", "memory")}


def compared(found):
    made = planning.plan(planning.run_of(**found["setting"]))
    said = {"time": (found["seconds"], made.step), "memory": (found["bytes"], made.held)}
    return {what: {"formula": mine, "error": round(mine / dry - 1, 4)} for what, (dry, mine) in said.items()}


def errors(found):
    sizes = sorted(map(abs, found))
    return {"rows": len(sizes), "median": statistics.median(sizes), "worst": sizes[-1]}


SAMPLE = tuple(cases())[:2]


def main():
    study.run("planner_validation", cases(), record, recipe(), summary)


if __name__ == "__main__":
    main()
