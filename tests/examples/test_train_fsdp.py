"""examples/train_fsdp.py: it computes what one device does, and survives kills, other numbers of ranks, bad files."""

import re
import shutil
import sys

import pytest
import ranks
import running
import torch
from killing import Kill, happened
from torch import nn

from examples import train_fsdp

SCRIPT = running.ROOT / "examples" / "train_fsdp.py"
TINY = "--layers 2 --width 24 --heads 3 --context 16 --batch-size 6 --seed 7".split()  # 3 ranks get uneven shards
RUN = [*TINY, *"--steps 10 --every 3 --checkpoints run --metrics run.csv --export net.pt".split()]


def torchrun(count, *arguments, plan=(), folder=None):
    script = running.planned(folder, *plan, script=SCRIPT) if plan else [SCRIPT]
    return [running.FORK, *running.TORCHRUN, count, *script, *arguments]


def exported(folder, name="net.pt"):
    return torch.load(folder / name, weights_only=True)


def numbers(folder):
    """The rows of the metrics."""
    return [[float(each) for each in line.split(",")] for line in running.lines(folder)[1:]]


def on_one_device(state, steps):
    """(rows of the metrics, state_dict) of plain PyTorch, from a state_dict on."""
    net = train_fsdp.Transformer(layers=2, width=24, heads=3, context=16)
    net.load_state_dict(state)
    tokens = train_fsdp.load_text(train_fsdp.TEXT, 16)[0]
    optimizer, rows = torch.optim.AdamW(net.parameters(), weight_decay=0.1), []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1) / 20
        loss = train_fsdp.loss_of(net, train_fsdp.sequences(tokens, 16, 6, train_fsdp.seed_of(7, step)))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        rows.append([step + 1, loss.item(), norm.item()])
    return rows, net.state_dict()


@torch.no_grad()
def loss_of_the_test(state):
    """The loss of the 64 sequences that every run is tested with."""
    net = train_fsdp.Transformer(layers=2, width=24, heads=3, context=16)
    net.load_state_dict(state)
    tokens = train_fsdp.load_text(train_fsdp.TEXT, 16)[1]
    return train_fsdp.loss_of(net, train_fsdp.sequences(tokens, 16, 64, 0)).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "options"),
    [(1, "--accumulate 3"), (2, "--recompute"), (3, "--accumulate 2"), (2, "--accumulate 3 --keep-gradients")],
)
def test_ranks_compute_what_one_device_computes(count, options, tmp_path):
    running.done([running.FORK, SCRIPT, *TINY, "--steps", "0", "--export", "first.pt"], tmp_path)
    said = running.done(torchrun(count, *RUN, *options.split()), tmp_path)
    rows, state = on_one_device(exported(tmp_path, "first.pt"), 10)
    assert float(re.search(r"test loss (\S+) nats", said)[1]) == pytest.approx(loss_of_the_test(state), abs=6e-4)
    torch.testing.assert_close(torch.tensor(numbers(tmp_path)), torch.tensor(rows), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(exported(tmp_path), state, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run by two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    said = running.done(torchrun(2, *RUN), folder)
    assert "step 10: loss" in said and "nats per byte" in said
    assert said.count("no checkpoint in run: starting from the beginning") == said.count("; ranks: 2\n") == 1
    return folder


def check_same(folder, other):
    """The same bits; and of the checkpoints only the last one is left, whole."""
    assert running.lines(folder) == running.lines(other) and running.equal(exported(folder), exported(other))
    assert [path.name for path in (folder / "run").iterdir()] == ["step-00000010"]
    assert (folder / "run" / "step-00000010" / ".metadata").exists()


KILLS = [Kill("step", 5, 1), Kill("fsync", 1, 1), Kill("fsync", 2, 0)]  # shards, .metadata


@pytest.mark.slow
def test_killed_ranks_on_two_machines_are_restarted_and_end_bit_for_bit_as_undisturbed_ones(undisturbed, tmp_path):
    script = running.planned(tmp_path, *KILLS, script=SCRIPT)
    with running.on_two_machines(tmp_path, "--max-restarts", len(KILLS), *script, *RUN) as runs:
        assert [run.ended() for run in runs] == [0, 0]
        assert all(run.vanished() for run in runs)
    assert happened(tmp_path / "plan.json") == len(KILLS)
    check_same(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_another_number_of_ranks(undisturbed, tmp_path):
    command = running.planned(tmp_path, Kill("step", 4, 0, how="SIGTERM"), script=SCRIPT)
    said = running.done([running.FORK, *running.TORCHRUN, 3, *command, *RUN], tmp_path)
    assert said.count("stopped by SIGTERM after step 4") == 1
    said = running.done([running.FORK, SCRIPT, *RUN], tmp_path)
    assert "resuming run/step-00000004 after step 4" in said
    torch.testing.assert_close(
        torch.tensor(numbers(tmp_path)), torch.tensor(numbers(undisturbed)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_virtual_gpus_compute_the_same_bits_as_the_cpu(undisturbed, tmp_path):
    command = [running.FORK, "-m", "virtual_gpus", "run", "-n", 2, SCRIPT, *RUN]
    running.done(command, tmp_path)
    check_same(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_network_that_somebody_has_trained_is_the_start(undisturbed, tmp_path):
    """Its bits come out as they went in, and training from there goes on where it was."""
    running.done(torchrun(2, *TINY, *f"--pretrained {undisturbed}/net.pt --steps 0 --export net.pt".split()), tmp_path)
    assert running.equal(exported(tmp_path), exported(undisturbed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--batch-size 5", "--batch-size 5 can't be split over 2 ranks and 1 passes"),
        ("--width 25", "--width 25 can't be divided by --heads 3"),
        ("--text nowhere.txt", "nowhere.txt is missing: name a text with --text"),
        ("--pretrained torn.pt", "torn.pt can't be read as a state_dict: "),
        ("--pretrained other.pt", "other.pt isn't of this network: tokens.weight is None, not (256, 24)"),
        ("--clip 2", "was trained with clip = 1.0, not 2.0: name another folder"),
        ("--text other.txt", "was trained with text_hash = "),
        ("--metrics run.csv --every 4 --checkpoints new", "run.csv has 10 steps, but their checkpoint is missing"),
        ("--export nowhere/net.pt", "Parent directory nowhere does not exist"),
    ],
)
def test_mistakes_are_named_once_and_all_ranks_leave(options, words, undisturbed, tmp_path):
    whole = (undisturbed / "net.pt").read_bytes()
    (tmp_path / "torn.pt").write_bytes(whole[: len(whole) // 2])
    torch.save({"a": torch.ones(3)}, tmp_path / "other.pt")
    (tmp_path / "other.txt").write_bytes(train_fsdp.TEXT.read_bytes().replace(b"Alice", b"Edith"))
    shutil.copy(undisturbed / "run.csv", tmp_path)
    resumed = ["--checkpoints", undisturbed / "run"] if "was trained" in words else []
    said = running.done(torchrun(2, *TINY, "--steps", 1, *options.split(), *resumed), tmp_path, status=1)
    assert said.count(words) == 1 and 'train_fsdp.py", line' not in said, said
    assert running.lines(tmp_path) == running.lines(undisturbed)


OWN_FOLDER = """
import os, runpy, sys
os.mkdir(os.environ["RANK"])
os.chdir(os.environ["RANK"])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_folder_that_not_all_ranks_see_is_named_before_they_train(tmp_path):
    (tmp_path / "own_folder.py").write_text(OWN_FOLDER)
    command = [running.FORK, *running.TORCHRUN, 2, "own_folder.py", SCRIPT, *RUN]
    said = running.done(command, tmp_path, status=1)
    assert said.count("rank 1 doesn't see rank 0's run: name a folder that all machines see") == 1, said
    assert 'train_fsdp.py", line' not in said and not [*tmp_path.glob("*/run/*")], said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lr", "words", "saved"),
    [
        ("1e17", r"^the loss of step \d+ is nan, the gradient.s norm nan: not saved", 1),
        ("1e30", r"^the norm of the parameters is inf after step 1: not saved", 0),
    ],
)
def test_a_network_of_nan_or_inf_stops_all_ranks_and_the_last_checkpoint_stays(lr, words, saved, tmp_path):
    said = running.done(torchrun(2, *RUN, "--every", 1, "--lr", lr), tmp_path, status=1)
    assert len(re.findall(words, said, re.M)) == 1 and 'train_fsdp.py", line' not in said, said
    assert len([*(tmp_path / "run").glob("*/.metadata")]) == saved


def test_a_rank_without_sequences_adds_nothing_to_the_loss():
    net = train_fsdp.Transformer(layers=1, width=8, heads=2, context=4)
    assert train_fsdp.loss_of(net, torch.zeros(0, 5, dtype=torch.long), reduction="sum") == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["error", "full"])
def test_a_disk_that_does_not_take_a_checkpoint_leaves_the_last_one(how, undisturbed, tmp_path):
    """An error of one rank's writer is told once. On a full disk PyTorch's writer ends the process (2.15)."""
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    plan = [Kill("fsync", 1, 1, how="error")] if how == "error" else []
    command = torchrun(2, *RUN, "--steps", 12, plan=plan, folder=tmp_path)
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "limited", sys.executable, ranks.FORKING]  # KiB
    said = running.done(command if plan else [*limited, *command[1:]], tmp_path, status=1)
    assert how == "full" or said.count("can't write to run (an error on one rank)") == 1, said
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"step-00000010", "step-00000012"}
    assert not (tmp_path / "run" / "step-00000012" / ".metadata").exists()
    running.done(torchrun(2, *RUN), tmp_path)
    assert running.equal(exported(tmp_path), exported(undisturbed))


def test_a_plan_has_all_the_ranks(tmp_path):
    """With twice as many GPUs, half of the parameters on each."""
    kibibytes = []
    for gpus in (8, 16):
        options = [*TINY, "--width", 96, "--batch-size", 16]
        said = running.done([running.FORK, "-m", "virtual_gpus", "plan", "-n", gpus, SCRIPT, *options], tmp_path)
        kibibytes.append(float(re.search(r"^parameters +([\d.]+) KiB$", said, re.MULTILINE)[1]))
    assert kibibytes[0] == pytest.approx(2 * kibibytes[1], rel=0.1)
