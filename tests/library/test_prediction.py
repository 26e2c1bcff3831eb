"""mgpu.predict: dry runs of training steps, compared with the same steps run on virtual GPUs that hold values."""

import re

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import mgpu_lib as mgpu
from mgpu_lib.prediction import bare


def images(n, size=224):
    return torch.empty(n, 3, size, size, device="meta")


def small():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 26 * 26, 10))


@pytest.mark.parametrize(
    "strategy, num_gpus", [("manual", 1), ("manual", 3), ("data_parallel", 1), ("data_parallel", 2)]
)
def test_in_one_process_it_is_the_same_step_with_values(strategy, num_gpus):
    """In shards of 11, 11 and 10 rows."""
    X, y = torch.rand(32, 1, 28, 28), torch.zeros(32, dtype=torch.long)
    with mgpu.virtual_gpus(num_gpus) as machine:
        nets = [small().to(device) for device in (machine.devices if strategy == "manual" else ["cuda:0"])]
        optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in nets]
        forward = nets if strategy == "manual" else [nn.DataParallel(nets[0], machine.devices)]
        shards = mgpu.split_batch(X, y, machine.devices[: len(nets)])

        def step():
            losses = [F.cross_entropy(f(X), y, reduction="sum") for f, X, y in zip(forward, *shards, strict=True)]
            for net in nets:
                net.zero_grad()
            for loss in losses:
                loss.backward()
            if len(nets) > 1:
                for params in zip(*(net.parameters() for net in nets), strict=True):
                    mgpu.allreduce([p.grad for p in params])
            for optimizer in optimizers:
                optimizer.step()

        seconds = mgpu.Timer(machine.devices).measure(step, repeats=1, warmup=1).median
    made = mgpu.predict(small(), X, n_gpus=num_gpus, strategy=strategy)
    assert made.seconds == pytest.approx(seconds, rel=0.02)  # the labels are made in the step here
    assert made.timeline.end - made.timeline.start == pytest.approx(made.seconds, rel=0.01) and 0 < made.mfu < 1
    assert made.ranks == made.timeline.gpus == list(range(num_gpus))


def test_ddp_s_first_rank_has_the_largest_shard_and_alone_it_is_the_plain_step():
    for rows, k, largest in ((4, 3, 2), (64, 1, 64)):
        made = mgpu.predict(small(), torch.empty(rows, 1, 28, 28), n_gpus=k, strategy="ddp")
        assert made.ranks == made.timeline.gpus == list(range(k)) and len(made.peak_memory) == k
        alone = mgpu.predict(small(), torch.empty(largest, 1, 28, 28))
        flops = [sum(e.flops for e in one.timeline.on(0) if e.kind in ("conv3x3", "matmul")) for one in (made, alone)]
        assert flops[0] == flops[1] > 0 and (k > 1 or made.seconds == pytest.approx(alone.seconds, rel=1e-6))


def test_ddp_needs_a_process_group_of_its_own():
    with mgpu.virtual_gpus(1):
        torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=torch.distributed.HashStore())
        with pytest.raises(RuntimeError, match="sets up a process group"):
            mgpu.predict(small(), torch.empty(4, 1, 28, 28), n_gpus=2, strategy="ddp")
        torch.distributed.destroy_process_group()


def test_precisions_and_a_faster_host():
    """What a program does that says nothing: TF32 in convolutions where the GPU has it, and nowhere else."""
    resnet = torchvision.models.resnet18()
    convolutions, products = (resnet, images(64)), (nn.Linear(4096, 4096), torch.empty(4096, 4096, device="meta"))

    def seconds(program, gpu, precision, **options):
        return mgpu.predict(*program, gpu, precision=precision, **options).seconds

    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    kinds = "fp32", "default", "tf32", "amp", "bf16"
    full, default, tf32, amp, bf16 = (seconds(convolutions, "A100-40", precision) for precision in kinds)
    assert full > default >= tf32 > amp and bf16 == pytest.approx(amp, rel=0.01)
    assert flags == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    for program, gpu in ((convolutions, "T4"), (products, "A100-40")):
        assert seconds(program, gpu, "default") == seconds(program, gpu, "fp32")
    slow, fast = (seconds((resnet, images(1)), "A100-40", "amp", host=host) for host in (1, 1 / 3))
    assert fast < 0.7 * slow, "where the host sets the pace"


def test_inference_takes_less_time_and_memory():
    net = torchvision.models.resnet18()
    training, inference = (mgpu.predict(net, images(32), training=t) for t in (True, False))
    assert inference.seconds < 0.5 * training.seconds
    assert inference.peak_memory[0] < 0.5 * training.peak_memory[0]
    assert {e.phase for e in inference.timeline} == {"forward"}
    assert net.training


def test_neither_the_model_nor_virtual_gpus_that_are_on_are_touched():
    with mgpu.virtual_gpus(2) as machine:
        net, X = small().to("cuda:1"), torch.rand(4, 1, 28, 28).to("cuda:1")
        values = {name: t.clone() for name, t in net.state_dict().items()}
        before = machine.elapsed(), dict(machine.traffic), machine.ledgers[1].allocated
        mgpu.predict(net, X, gpu="T4", n_gpus=2)
        assert before == (machine.elapsed(), dict(machine.traffic), machine.ledgers[1].allocated)
        assert mgpu.current_machine() is machine
        assert all(torch.equal(values[name], t) for name, t in net.state_dict().items())
        assert all(p.grad is None and p.get_device() == 1 for p in net.parameters())
    shared = nn.Linear(3, 3)
    copy = bare(nn.Sequential(shared, shared))
    assert copy[0] is copy[1] and all(p.is_meta for p in copy.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": "V1000"}, "no GPU named 'V1000'. Did you mean 'V100'"),
        ({"n_gpus": 5}, "n_gpus=5 for a batch of 4"),
        ({"strategy": "fsdp"}, "'manual', 'data_parallel', 'ddp'"),
        ({"precision": "fp8"}, "'fp32', 'tf32', 'default', 'amp', 'bf16'"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0: the MiB of a bucket must be a number above 0"),
        ({"network": "InfiniBand HDR"}, "needs a machine type"),
        ({"gpu": "T4", "precision": "bf16"}, "the T4 has no tensor cores for it"),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        mgpu.predict(small(), torch.empty(4, 1, 28, 28), **options)
    assert mgpu.current_machine() is None


def test_what_is_no_model_and_no_batch():
    for model, batch in [(F.relu, torch.zeros(3)), (nn.ReLU(), [1, 2]), (nn.ReLU(), torch.tensor(1.0))]:
        with pytest.raises(TypeError, match="pass a"):
            mgpu.predict(model, batch)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, X):
        return self.used(X)


def test_models_that_cannot_be_trained():
    X, frozen = torch.empty(6, 4), nn.Linear(4, 4).requires_grad_(False)
    assert mgpu.predict(Unused(), X, n_gpus=2).seconds > 0
    for model in (frozen, nn.ReLU()):
        for strategy in ("manual", "data_parallel", "ddp"):
            assert mgpu.predict(model, X, n_gpus=2, strategy=strategy, training=False).seconds > 0
    for model, options, words in [
        (Unused(), {"n_gpus": 2, "strategy": "ddp"}, "2 of the model's 4 parameters got no gradient"),
        *((model, {}, "nothing to train") for model in (frozen, nn.ReLU())),
        (nn.Flatten(), {"training": False}, "Flatten runs nothing on a GPU"),
        (nn.LazyLinear(3), {}, "call it once"),
    ]:
        with pytest.raises(ValueError, match=words):
            mgpu.predict(model, X, **options)
    with pytest.raises(torch.OutOfMemoryError, match=r"GPU 0 has a total capacity of 14\.74 GiB"):
        mgpu.predict(nn.Linear(4, 4), torch.empty(2**30, 4, device="meta"), gpu="T4")
    tokens = torch.zeros(4, 16, dtype=torch.long, device="meta")
    assert mgpu.predict(nn.Embedding(100, 32), tokens).seconds > 0, "outputs (N, tokens, width), of which the mean"


def test_a_prediction_counts_the_whole_step_however_long_it_is(monkeypatch):
    """A dry run, of which strategy "ddp" makes one: virtual-gpus/tests/test_clock.py."""

    def predicted():
        net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
        return mgpu.predict(net, torch.empty(64, 512), "V100", 2)

    whole = predicted()
    monkeypatch.setattr("virtual_gpus.clock.events.MAX_EVENTS", 30)
    made = predicted()
    assert made.timeline.dropped > 30 > 0 == whole.timeline.dropped
    assert (made.flops, made.seconds, made.mfu) == (whole.flops, whole.seconds, whole.mfu)
