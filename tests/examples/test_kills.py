"""examples/train_ddp.py, killed or stopped: it resumes as if nothing had happened, and leaves no file half written.

That torchrun restarts its ranks so, the page on jobs that survive shows.
"""

import pytest
import running
from killing import Kill, happened

SIXTY_STEPS = "--batch-size 6 --images 60 --epochs 6 --every 4 --checkpoint run.pt --metrics run.csv".split()
pytestmark = pytest.mark.slow


def alone(folder, plan, *arguments):
    """Run the script in one process, started again after each kill."""
    folder.mkdir(exist_ok=True)
    command = running.FORK, *running.planned(folder, *plan), *(arguments or SIXTY_STEPS)
    for _ in plan:
        running.done(command, folder, status=-9)
    running.done(command, folder)
    assert happened(folder / "plan.json") == len(plan)


def torchrun(folder, plan, *options, virtual=()):
    return [running.FORK, *running.TORCHRUN, "2", *options, *virtual, *running.planned(folder, *plan), *SIXTY_STEPS]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run by two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    running.done(torchrun(folder, []), folder)
    assert len(running.lines(folder)) == 61
    return folder


def test_a_killed_process_started_again_ends_as_an_undisturbed_one(tmp_path):
    moments = ("step", 5), ("half", 1), ("fsync", 2), ("replace", 1), ("replaced", 2)
    alone(tmp_path / "undisturbed", [])
    alone(tmp_path / "killed", [Kill(moment, count, 0) for moment, count in moments])
    assert running.same_run(tmp_path / "undisturbed", tmp_path / "killed")


def test_ranks_killed_on_two_machines_are_restarted_and_end_as_undisturbed_ones(undisturbed, tmp_path):
    plan = [Kill("step", 6, 1), Kill("half", 1, 0), Kill("step", 3, 0)]
    script = running.planned(tmp_path, *plan)
    with running.on_two_machines(tmp_path, "--max-restarts", len(plan), *script, *SIXTY_STEPS) as runs:
        assert [run.ended() for run in runs] == [0, 0]
        assert all(run.vanished() for run in runs)
    assert happened(tmp_path / "plan.json") == len(plan) and running.same_run(tmp_path, undisturbed)


def test_after_a_kill_of_torchrun_the_same_command_ends_as_an_undisturbed_one(undisturbed, tmp_path):
    command = torchrun(tmp_path, [Kill("step", 7, 1, "agent"), Kill("half", 2, 0, "agent")])
    for saved in (4, 8):
        with running.started(command, tmp_path) as run:
            assert run.ended() == -9, run.said
            assert run.vanished(), "ranks have outlived torchrun"
        assert running.checkpoint(tmp_path)["step"] == saved
    running.done(command, tmp_path)
    assert running.same_run(tmp_path, undisturbed)


def test_sigterm_for_one_rank_stops_all_of_them_and_the_run_resumes_to_the_same_bit(undisturbed, tmp_path):
    command = torchrun(tmp_path, [Kill("step", 30, 1, how="SIGTERM")])
    assert running.done(command, tmp_path).count("stopped by SIGTERM after step 30") == 1
    assert len(running.lines(tmp_path)) == 31 and running.checkpoint(tmp_path)["step"] == 30
    running.done(command, tmp_path)
    assert running.same_run(tmp_path, undisturbed)


def test_virtual_gpus_compute_and_resume_to_the_same_bit(undisturbed, tmp_path):
    """The losses are those of two ranks on the CPU, and so are the parameters."""
    plan = [Kill("step", 6, 1), Kill("half", 1, 0)]
    running.done(torchrun(tmp_path, plan, "--max-restarts", 2, virtual=("-m", "virtual_gpus")), tmp_path)
    assert happened(tmp_path / "plan.json") == 2 and running.same_run(tmp_path, undisturbed)


def test_gradients_that_add_up_in_mixed_precision_resume_to_the_same_bit(tmp_path):
    """With fp16's scale."""
    options = "--batch-size 6 --images 18 --accumulate 3 --amp fp16 --seed 7 --epochs 2 --every 3"
    arguments = [*options.split(), *"--checkpoint run.pt --metrics run.csv".split()]
    alone(tmp_path / "undisturbed", [], *arguments)
    alone(tmp_path / "killed", [Kill("step", 4, 0), Kill("replace", 1, 0)], *arguments)
    assert running.same_run(tmp_path / "undisturbed", tmp_path / "killed")


def test_a_resnet_of_three_ranks_resumes_to_the_same_bit(tmp_path):
    """With the statistics of batch norm. And the sum of three numbers depends on their order, and so on how gradients
    are laid out in buckets."""
    arguments = "--net resnet18 --images 6 --batch-size 3 --every 2 --checkpoint run.pt --metrics run.csv".split()
    folders = [tmp_path / "once", tmp_path / "twice"]
    for folder, epochs in zip((folders[0], folders[1], folders[1]), (2, 1, 2), strict=True):
        folder.mkdir(exist_ok=True)
        running.done([running.FORK, *running.TORCHRUN, "3", running.SCRIPT, *arguments, "--epochs", epochs], folder)
    assert running.same_run(*folders)
