"""examples/train_ddp.py: what it computes, what it writes, and how it ends."""

import os
import platform
import re
import signal
import sys

import killing
import pytest
import ranks
import running
import torch
from ranks import happens

from examples import train_ddp, train_fsdp

PLAIN = running.FORK, running.SCRIPT
SHORT = "--batch-size 24 --images 120 --epochs 1 --checkpoint run.pt --metrics run.csv".split()
LONG = "--batch-size 12 --images 120 --epochs 20 --every 1000 --checkpoint run.pt --metrics run.csv".split()


def torchrun(*arguments, script=(running.SCRIPT,)):
    return [running.FORK, *running.TORCHRUN, 2, *script, *arguments]


def test_one_process_trains_saves_and_has_nothing_left_to_do(tmp_path):
    (tmp_path / "run.csv").write_text("step,epo")  # what a run has left whose disk was full
    said = running.done([*PLAIN, *SHORT], tmp_path)
    assert "epoch 0, step 5: loss" in said and "test accuracy" in said
    assert "no checkpoint run.pt: starting from the beginning" in said
    table = [line.split(",") for line in running.lines(tmp_path)]
    assert table[0] == ["step", "epoch", "loss", "accuracy"]
    assert [row[:2] for row in table[1:]] == [[str(step), "0"] for step in range(1, 6)]
    assert all(float(row[2]) > 0 for row in table[1:]) and [bool(row[3]) for row in table[1:]] == 4 * [False] + [True]
    assert running.checkpoint(tmp_path)["step"] == 5 and not (tmp_path / "run.pt.new").exists()
    assert "loss" not in running.done([*PLAIN, *SHORT], tmp_path)  # all is done
    assert [line.split(",") for line in running.lines(tmp_path)] == table


def test_two_ranks_count_every_test_image_once(tmp_path):
    """61 images can't be halved: a share of correct ones is a whole number of sixty-firsts."""
    said = running.done(torchrun(*SHORT), tmp_path)
    device = "nccl on cuda" if torch.cuda.device_count() >= 2 else "gloo on cpu"
    assert said.count(f"{platform.node()}: {device}; ranks: 2\n") == 1
    correct = 61 * float(running.lines(tmp_path)[-1].split(",")[3])
    assert correct == pytest.approx(round(correct), abs=1e-9) and running.checkpoint(tmp_path)["step"] == 5


def test_every_epoch_has_all_images_in_another_order_and_every_batch_is_moved_in_another_way(monkeypatch):
    orders, seeds = [], set()

    class Noting(train_ddp.DistributedSampler):
        def __iter__(self):
            orders.append(list(super().__iter__()))
            return iter(orders[-1])

    monkeypatch.setattr(train_ddp, "DistributedSampler", Noting)

    def shifted(X):
        seeds.add(torch.initial_seed() % 2**32)  # all that a CPU's generator looks at
        return X

    monkeypatch.setattr(train_ddp, "shifted", shifted)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for seed in "01":
        run = "train_ddp.py --data digits --images 24 --batch-size 12 --epochs 2 --seed".split()
        monkeypatch.setattr(sys, "argv", [*run, seed])
        train_ddp.main()
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]) == list(range(24))
    assert len(seeds) == 2 * 4


# A run that is resumed


@pytest.mark.slow
def test_a_run_can_be_lengthened_but_not_changed(tmp_path):
    running.done([*PLAIN, *SHORT], tmp_path)
    said = running.done([*PLAIN, *SHORT, "--epochs", "2"], tmp_path)
    assert "resuming run.pt after step 5" in said and len(running.lines(tmp_path)) == 11
    before = (tmp_path / "run.pt").read_bytes()
    said = running.done([*PLAIN, *SHORT, "--epochs", "3", "--lr", "0.1"], tmp_path, status=1)
    assert "run.pt was trained with lr = 0.05, not 0.1: name another file" in said and "Traceback" not in said
    assert (tmp_path / "run.pt").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-size", "25"], "--batch-size 25 can't be split over 2 ranks and 1 passes"),
        (["--data", "nowhere"], "nowhere/FashionMNIST/raw/train-images-idx3-ubyte is missing. To download it: python"),
    ],
)
def test_mistakes_are_named_once(options, words, tmp_path):
    assert running.done(torchrun(*SHORT, *options), tmp_path, status=1).count(words) == 1


ALONE = """
import os, runpy, sys, time
import torch.distributed as dist
rank, get_rank = os.environ["RANK"], dist.get_rank
dist.get_rank = lambda: (rank == "0" and time.sleep(1), get_rank())[1]  # rank 0 is slow
sys.argv = sys.argv[1:-2] if rank == "0" else sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option"), [("train_ddp", "--data"), ("train_fsdp", "--text")])
def test_a_mistake_on_one_machine_is_named_by_another_one_though_it_is_slow(name, option, tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    script = tmp_path / "alone.py", running.SCRIPT.with_stem(name)
    said = running.done(torchrun("--batch-size", 24, option, "nowhere", script=script), tmp_path, status=1)
    assert "nowhere" in said and said.count("is missing") == 1 and f'{name}.py", line' not in said, said


@pytest.mark.slow
def test_a_torn_checkpoint_is_named_once_and_all_ranks_leave(tmp_path):
    running.done([*PLAIN, *SHORT], tmp_path)
    whole = (tmp_path / "run.pt").read_bytes()
    (tmp_path / "run.pt").write_bytes(whole[: len(whole) // 2])
    said = running.done(torchrun(*SHORT, "--epochs", "2"), tmp_path, status=1)
    assert said.count("run.pt can't be read as a checkpoint (") == 1 and 'train_ddp.py", line' not in said, said


# Signals and failures


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a LONG run by two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    running.done(torchrun(*LONG), folder)
    return folder


@pytest.mark.slow
def test_torchrun_passes_sigterm_on(tmp_path):
    """Nothing is forked: torchrun and its ranks are as a reader starts them."""
    command = sys.executable, *torchrun(*LONG)[1:]
    with running.started(command, tmp_path) as run:
        assert running.stop_after([run], tmp_path, 4) == [1]  # torchrun's own, whatever its ranks do
        assert run.said.count("stopped by SIGTERM after step") == 1 and run.vanished()
    assert len(running.lines(tmp_path)) == 1 + running.checkpoint(tmp_path)["step"] < 201


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [(0, 1), (1,)])
def test_sigterm_on_two_machines_or_one_is_followed_by_a_run_that_resumes_to_the_same_bit(
    stopped, undisturbed, tmp_path
):
    command = running.SCRIPT, *LONG
    with running.on_two_machines(tmp_path, *command) as runs:
        assert running.stop_after([runs[i] for i in stopped], tmp_path, 60) == [1] * len(stopped)
        said = "stopped by SIGTERM after step"
        assert happens(lambda: sum(run.said.count(said) for run in runs) == 1, running.LIMIT)
        # If one is left, its torchrun would wait some minutes for the other. Here it is killed.
        assert len(stopped) == 1 or all(run.vanished() for run in runs)
    assert len(running.lines(tmp_path)) == 1 + running.checkpoint(tmp_path)["step"] < 201
    with running.on_two_machines(tmp_path, *command) as runs:
        assert [run.ended() for run in runs] == [0, 0]
    assert running.same_run(tmp_path, undisturbed)


@pytest.mark.slow
def test_sigterm_for_one_rank_stops_all_of_them(tmp_path):
    running.done(torchrun(*LONG, script=running.planned(tmp_path, killing.Kill("step", 3, 1, how="SIGTERM"))), tmp_path)
    assert len(running.lines(tmp_path)) == 1 + running.checkpoint(tmp_path)["step"] == 4


@pytest.mark.slow
def test_an_interrupt_leaves_no_process(tmp_path):
    command = torchrun(*LONG, "--every", "2")
    with running.started(command, tmp_path) as run:
        assert running.stop_after([run], tmp_path, 6, signal.SIGINT) != [0]
        assert run.vanished(), run.family()
        assert running.checkpoint(tmp_path)["step"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "virtual"), [(0, ("-m", "virtual_gpus")), (1, ())], ids=["virtual", "gloo"])
def test_an_error_on_one_rank_ends_the_others(rank, virtual, tmp_path):
    script = *virtual, *running.planned(tmp_path, killing.Kill("step", 3, rank, how="error"))
    said = running.done(torchrun(*LONG, script=script), tmp_path, status=1)
    assert "RuntimeError: an error on one rank" in said and len(running.lines(tmp_path)) <= 4


@pytest.mark.parametrize("script", [train_ddp, train_fsdp])
def test_an_error_on_one_rank_is_told_before_anything_waits_for_the_others(script, monkeypatch):
    """NCCL ends a group together: a rank that left it before it told its error would wait, and be killed."""
    ended = []

    def train(args, device):
        raise RuntimeError("an error on one rank")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py"])
        patch.setattr(script, "train", train)
        patch.setattr(script.dist, "destroy_process_group", lambda: ended.append(1))
        with pytest.raises(RuntimeError, match="an error on one rank"):
            script.main()
    script.dist.destroy_process_group()
    assert not ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words", "saved"),
    [
        ("--lr 1e18", r"^the loss of step 2 is nan: not saved", 1),
        ("--lr 1e30", r"^the norm of the parameters is inf after step 1: not saved", 0),
        # The scaler skips sixteen steps first, which spoil nothing.
        ("--lr 1e18 --amp fp16 --images 10 --batch-size 2 --epochs 5 --every 99", "^the loss of step 1[678] is nan", 0),
    ],
)
def test_a_network_of_nan_or_inf_stops_all_ranks_and_the_last_checkpoint_stays(options, words, saved, tmp_path):
    said = running.done(torchrun(*SHORT, "--every", "1", *options.split()), tmp_path, status=1)
    assert len(re.findall(words, said, re.M)) == 1 and 'train_ddp.py", line' not in said, said
    assert (running.checkpoint(tmp_path)["step"] if saved else (tmp_path / "run.pt").exists()) == saved


# Disks


@pytest.fixture
def good(tmp_path):
    """A folder with a checkpoint, and the bytes of that."""
    running.done([*PLAIN, *SHORT], tmp_path)
    return tmp_path, (tmp_path / "run.pt").read_bytes()


def check_refusal(said, good, reason, file="the checkpoint run.pt after step 10"):
    folder, content = good
    assert said.count(f"can't write {file} (") == 1 and reason in said, said
    assert 'train_ddp.py", line' not in said, said  # no traceback, but torchrun's own
    assert (folder / "run.pt").read_bytes() == content


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["No space left on device"] * os.path.exists("/dev/full") + ["Is a directory"])
def test_a_disk_that_does_not_take_a_checkpoint_is_named_and_the_last_one_stays(reason, good):
    """It is full: what was begun goes; or the file can't even be opened."""
    new = good[0] / "run.pt.new"
    new.mkdir() if "directory" in reason else new.symlink_to("/dev/full")
    check_refusal(running.done(torchrun(*SHORT, "--epochs", "2"), good[0], status=1), good, reason)
    assert os.path.lexists(new) == new.is_dir()


@pytest.mark.slow
def test_metrics_of_more_steps_than_a_run_without_a_checkpoint_can_have_are_kept(good):
    (good[0] / "run.pt").unlink()
    before = running.lines(good[0])
    said = running.done(torchrun(*SHORT, "--every", "4"), good[0], status=1)
    assert said.count("run.csv has 5 steps, but their checkpoint is missing: name another file") == 1, said
    assert running.lines(good[0]) == before and not (good[0] / "run.pt").exists()
    running.done([*PLAIN, *SHORT, "--every", "5"], good[0])  # it may have been killed before it saved step 5
    assert len(running.lines(good[0])) == len(before)


@pytest.mark.slow
def test_metrics_without_room_are_named_and_the_last_checkpoint_stays(good):
    """Both ranks leave before they would save a checkpoint whose metrics have a gap."""
    metrics = good[0] / "run.csv"
    before = metrics.read_text().removesuffix("\n").ljust(100 * 1024 - 10) + "\n"
    metrics.write_text(before)
    limited = ["bash", "-c", 'ulimit -f 100; exec "$@"', "limited"]
    arguments = [*SHORT, "--epochs", "2", "--every", "1"]
    command = *limited, sys.executable, ranks.FORKING, *torchrun(*arguments)[1:]
    check_refusal(running.done(command, good[0], status=1), good, "File too large", "the metrics run.csv")
    assert metrics.read_text().startswith(before) and len(metrics.read_text()) == 100 * 1024  # half a line
    running.done(torchrun(*arguments), good[0])
    assert [line.split(",")[0] for line in running.lines(good[0])] == ["step", *map(str, range(1, 11))]
