"""mgpu.predict: dry runs of training steps, compared with the same steps run on virtual GPUs that hold values."""

import re
from functools import partial

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import mgpu_lib as mgpu
from mgpu_lib.prediction import bare
from virtual_gpus.clock.costs import ring_seconds


@pytest.fixture(scope="module")
def resnet50():
    with torch.device("meta"):
        return torchvision.models.resnet50()


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


@pytest.mark.slow
def test_ddp_hides_its_all_reduce_behind_backward(resnet50):
    def seconds(**options):
        return mgpu.predict(resnet50, images(256), n_gpus=4, **options).seconds

    alone = mgpu.predict(resnet50, images(64)).seconds
    ddp = mgpu.predict(resnet50, images(256), n_gpus=4, strategy="ddp")
    ring = ring_seconds(sum(p.nbytes for p in resnet50.parameters()), 4, mgpu.virtual_gpus(4).link)
    assert alone < ddp.seconds < alone + 0.8 * ring + 0.03 * alone
    assert all(share > 0.5 for share in ddp.timeline.overlap().values())
    assert ddp.seconds < seconds(strategy="manual") and ddp.seconds < seconds(strategy="data_parallel")
    assert seconds(strategy="ddp", link="pcie") > ddp.seconds


def test_ddp_needs_a_process_group_of_its_own():
    with mgpu.virtual_gpus(1):
        torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=torch.distributed.HashStore())
        with pytest.raises(RuntimeError, match="sets up a process group"):
            mgpu.predict(small(), torch.empty(4, 1, 28, 28), n_gpus=2, strategy="ddp")
        torch.distributed.destroy_process_group()


def test_precisions_and_a_faster_host():
    net = torchvision.models.resnet18()
    predicted = partial(mgpu.predict, net, gpu="A100-40")
    full, tf32, amp = (predicted(images(64), precision=p).seconds for p in ("fp32", "tf32", "amp"))
    assert full > tf32 > amp
    slow, fast = (predicted(images(1), precision="amp", host=host).seconds for host in (1, 1 / 3))
    assert fast < 0.7 * slow, "where the host sets the pace"
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    mgpu.predict(small(), torch.empty(2, 1, 28, 28), gpu="A100-40", precision="tf32")
    assert flags == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


def test_default_is_what_a_program_does_that_says_nothing():
    """TF32 in convolutions where the GPU has it, and nowhere else."""
    convolutions = torchvision.models.resnet18(), images(64)
    products = torch.nn.Linear(4096, 4096), torch.empty(4096, 4096, device="meta")

    def seconds(program, gpu, precision):
        return mgpu.predict(*program, gpu=gpu, precision=precision).seconds

    assert seconds(convolutions, "T4", "default") == seconds(convolutions, "T4", "fp32")
    tf32, default, fp32 = (seconds(convolutions, "A100-40", p) for p in ("tf32", "default", "fp32"))
    assert tf32 <= default < fp32
    assert seconds(products, "A100-40", "default") == seconds(products, "A100-40", "fp32")


def test_autocast_to_bfloat16():
    net = torchvision.models.resnet18()
    half, brain = (mgpu.predict(net, images(64), "A100-40", precision=p).seconds for p in ("amp", "bf16"))
    assert brain == pytest.approx(half, rel=0.01)


def test_inference_takes_less_time_and_memory():
    net = torchvision.models.resnet18()
    training, inference = (mgpu.predict(net, images(32), training=t) for t in (True, False))
    assert inference.seconds < 0.5 * training.seconds
    assert inference.peak_memory[0] < 0.5 * training.peak_memory[0]
    assert {e.phase for e in inference.timeline} == {"forward"}
    assert net.training


def test_the_model_is_neither_changed_nor_read():
    net = small()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    mgpu.predict(net, torch.rand(4, 1, 28, 28), n_gpus=2)
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())
    assert all(p.grad is None and p.device.type == "cpu" for p in net.parameters())
    shared = nn.Linear(3, 3)
    copy = bare(nn.Sequential(shared, shared))
    assert copy[0] is copy[1] and all(p.is_meta for p in copy.parameters())


def test_predicting_while_virtual_gpus_are_on_leaves_them_alone():
    with mgpu.virtual_gpus(2) as machine:
        net, X = small().to("cuda:1"), torch.rand(4, 1, 28, 28).to("cuda:1")
        before = machine.elapsed(), dict(machine.traffic), machine.ledgers[1].allocated
        mgpu.predict(net, X, gpu="T4")
        assert before == (machine.elapsed(), dict(machine.traffic), machine.ledgers[1].allocated)
        assert mgpu.current_machine() is machine


def test_buckets_travel_within_a_node_and_between_nodes():
    """Each bucket is one collective, which takes longer over the network; the numbers that travel are the same."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.ReLU())]  # of 4 MiB each
    net, found = nn.Sequential(*layers, nn.Linear(1024, 10)), {}

    def sums(bucket, k):
        X, network = torch.empty(4 * k, 1024, device="meta"), "InfiniBand HDR" if k > 8 else None
        made = mgpu.predict(net, X, "A100-80", k, "ddp", link="DGX A100", network=network, bucket_cap_mb=bucket)
        return [e for e in made.timeline.on(0) if "all" in e.name and e.kind == "collective"]

    for bucket in (4, 25, None):
        found[bucket], between = sums(bucket, 8), sums(bucket, 16)
        sent = [e.nbytes for e in found[bucket]]
        assert sent == [e.nbytes for e in between] and sum(sent) == sum(p.nbytes for p in net.parameters()), "each once"
        assert all(near.end - near.start < far.end - far.start for near, far in zip(found[bucket], between))
    assert len(found[4]) > len(found[25]) == len(found[None]) - 1, "the first MiB travels alone"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": "V1000"}, "no GPU named 'V1000'. Did you mean 'V100'"),
        ({"link": "infiniband"}, "no link named"),
        ({"gpu": "T4", "link": "nvlink"}, "has no NVLink"),
        ({"n_gpus": 0}, "at least 1"),
        ({"n_gpus": 2.0}, "whole number"),
        ({"n_gpus": 5}, "n_gpus=5 for a batch of 4"),
        ({"strategy": "fsdp"}, "'manual', 'data_parallel', 'ddp'"),
        ({"precision": "fp8"}, "'fp32', 'tf32', 'default', 'amp', 'bf16'"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0: the MiB of a bucket must be a number above 0"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb='25'"),
        ({"network": "InfiniBand HDR"}, "needs a machine type"),
        ({"gpu": "V100", "precision": "tf32"}, "no tensor cores for it"),
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
