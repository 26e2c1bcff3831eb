#!/usr/bin/env python3
"""Stand-ins for Slurm's commands: what this file is called by, sbatch, srun or scontrol, is what it does.

Each writes the arguments and the environment that it got to the file $SLURM_RECORD, a line of JSON. sbatch runs the
script, srun its command once for every node, all of which are this machine.
"""

import json
import os
import re
import subprocess
import sys
import time

NAME, ARGUMENTS = os.path.basename(sys.argv[0]).removesuffix(".py"), sys.argv[1:]


def sbatch(script):
    """Run a script in an allocation as its #SBATCH lines ask for."""
    with open(script) as file:
        options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", file.read(), re.M))
    nodes, ends = options["nodes"], int(time.time()) + int(os.environ.get("SLURM_LEFT", 4 * 3600))
    job = {"SLURM_JOB_ID": os.environ["SLURM_JOB"], "SLURM_JOB_NODELIST": f"node[1-{nodes}]", "SLURM_NNODES": nodes}
    job["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
    return subprocess.call(["bash", script], env=os.environ | job | {"SLURM_JOB_END_TIME": str(ends)})


def srun(option, cpus, *command):
    """Run a command on every node with that many cores, as versions want it that inherit no number from sbatch."""
    if option != "--cpus-per-task" or cpus != os.environ["SLURM_CPUS_PER_TASK"]:
        sys.exit("srun: a task would get one core")
    if "SLURM_FAIL" in os.environ:
        return int(os.environ["SLURM_FAIL"])
    nodes = range(int(os.environ["SLURM_NNODES"]))
    tasks = [
        subprocess.Popen(command, env=os.environ | {"SLURM_NODEID": str(n), "SLURM_PROCID": str(n)}) for n in nodes
    ]
    return max([task.wait() for task in tasks])


def scontrol(verb, what, *nodes):
    if [verb, what] == ["show", "hostnames"]:
        print("127.0.0.1\n" * int(os.environ["SLURM_NNODES"]), end="")


if __name__ == "__main__":
    with open(os.environ["SLURM_RECORD"], "a") as record:
        slurm = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
        record.write(json.dumps([NAME, ARGUMENTS, slurm]) + "\n")
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[NAME](*ARGUMENTS) or 0)
