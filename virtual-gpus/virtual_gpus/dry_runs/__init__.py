"""Dry runs: a program of many processes, of which one rank or a few are run in this process, without values.

**Which ranks are run.** `dry_run` runs the one that it is asked for. A collective needs no other: the ranks that aren't
run are taken to call it at the same time, with tensors of the same shape. A message has one sender and one receiver,
and both must be run; the first message to a rank that isn't raises MissingRanks, and the run begins anew with it
(`dry_run.run_ranks`). So a data-parallel program of 1,024 GPUs is one rank, a pipeline of 8 stages is eight.

**What is known of the others.** Nothing that differs: they have the constants (`virtual_gpus.constants`) and the Python
objects of the ranks that are run. What would need more, such as another rank's values, is an error.

**How ranks alternate.** Each has a thread, and one of them runs at a time: until it waits for another rank. Then the
`Scheduler` lets the next one go on that can. So everything happens in the same order every time, and when each waits
for another one, the program would hang: an error says where.

**Where they meet.** At the `Rendezvous`: collectives and messages of GPUs come there by way of the `DryCommunicator`,
which the machine of a dry run gives to its process groups, and Python objects by way of `patches.objects`.

**What a rank owns.** PyTorch and Python keep much once in a process that a rank must have for itself: environment,
random numbers, the program's modules, process groups, the machine that is on. `RankContexts` exchanges it whenever
another rank is to run.

**When it ends.** Steps are taken until two are alike (`steps`); the last one becomes the `Prediction`.
"""
