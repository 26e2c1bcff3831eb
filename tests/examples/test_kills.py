"""examples/train_ddp.py, killed: it resumes as if nothing had happened, and leaves no file half written.

That torchrun restarts its ranks so, the page on jobs that survive shows.
"""

import killing
import pytest
import running

SIXTY_STEPS = "--batch-size 6 --images 60 --epochs 6 --every 4 --checkpoint run.pt --metrics run.csv".split()
pytestmark = pytest.mark.slow


def alone(folder, plan, *arguments):
    """Run the script in one process, started again after each kill."""
    folder.mkdir(exist_ok=True)
    command = running.FORK, *running.planned(folder, *plan), *(arguments or SIXTY_STEPS)
    for _ in plan:
        running.done(command, folder, status=-9)
    running.done(command, folder)


def torchrun(folder, plan, *options, virtual=()):
    folder.mkdir(exist_ok=True)
    return [running.FORK, *running.TORCHRUN, "2", *options, *virtual, *running.planned(folder, *plan), *SIXTY_STEPS]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run by two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    running.done(torchrun(folder, []), folder)
    assert len(running.lines(folder)) == 61
    return folder


def test_a_killed_process_started_again_ends_as_an_undisturbed_one(tmp_path):
    plan, undisturbed_alone = killing.drawn(1, 10, ranks=1), tmp_path / "alone"  # with all moments
    alone(undisturbed_alone, [])
    alone(tmp_path, plan)
    assert killing.happened(tmp_path / "plan.json") == len(plan) and running.same_run(tmp_path, undisturbed_alone)


def test_ranks_killed_on_two_machines_are_restarted_and_end_as_undisturbed_ones(undisturbed, tmp_path):
    plan = killing.drawn(8, 3, ranks=2)
    script = running.planned(tmp_path, *plan)
    with running.on_two_machines(tmp_path, "--max-restarts", len(plan), *script, *SIXTY_STEPS) as runs:
        assert [run.ended() for run in runs] == [0, 0]
        assert all(run.vanished() for run in runs)
    assert killing.happened(tmp_path / "plan.json") == len(plan) and running.same_run(tmp_path, undisturbed)


def test_after_a_kill_of_torchrun_the_same_command_ends_as_an_undisturbed_one(undisturbed, tmp_path):
    plan, path = killing.drawn(6, 3, ranks=2, victim="agent"), tmp_path / "run.pt"
    command = torchrun(tmp_path, plan)
    for count in range(1, len(plan) + 1):
        with running.started(command, tmp_path) as run:
            assert run.ended() == -9, run.said
            assert run.vanished(), "ranks have outlived torchrun"
        assert killing.happened(tmp_path / "plan.json") == count
        assert not path.exists() or running.checkpoint(tmp_path)["step"] % 4 == 0
    running.done(command, tmp_path)
    assert running.same_run(tmp_path, undisturbed)


def test_virtual_gpus_compute_and_resume_to_the_same_bit(undisturbed, tmp_path):
    """The losses are those of two ranks on the CPU, and so are the parameters."""
    plan, virtual = [killing.Kill("step", 6, 1), killing.Kill("half", 1, 0)], ("-m", "virtual_gpus")
    running.done(torchrun(tmp_path, plan, "--max-restarts", 2, virtual=virtual), tmp_path)
    assert killing.happened(tmp_path / "plan.json") == 2 and running.same_run(tmp_path, undisturbed)


@pytest.mark.parametrize(
    "options",
    [
        "--batch-size 8 --images 24 --accumulate 2 --amp bf16",
        "--batch-size 6 --images 18 --accumulate 3 --amp fp16 --seed 7",
    ],
)
def test_other_options_resume_to_the_same_bit(options, tmp_path):
    """Mixed precision (and fp16's scale), and gradients that add up."""
    arguments = [*options.split(), *"--epochs 2 --every 3 --checkpoint run.pt --metrics run.csv".split()]
    alone(tmp_path / "undisturbed", [], *arguments)
    alone(tmp_path / "killed", [killing.Kill("step", 4, 0), killing.Kill("replace", 1, 0)], *arguments)
    assert killing.happened(tmp_path / "killed" / "plan.json") == 2
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
