"""What other people's programs ask of PyTorch and of CUDA: classes that stay classes, subclasses of tensors, old names,
and code of the CPU that must not suffer."""

import copy
import ctypes
import io
import pickle
from functools import partial

import pytest
import ranks
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from virtual_gpus import patches, virtual_gpus
from virtual_gpus.patches import cpu_builds
from virtual_gpus.patches.legacy import LEGACY

GPU0, GPU1 = torch.device("cuda:0"), torch.device("cuda:1")


class Marked(torch.Tensor):
    """A subclass of tensors that keeps PyTorch's own __torch_function__."""


class Asking(torch.Tensor):
    """A subclass with a __torch_function__ of its own, which leaves the work to that of torch.Tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_build_without_cuda_looks_as_one_with_it(monkeypatch):
    monkeypatch.setattr(patches, "PATCHES", [*patches.PATCHES, *cpu_builds.REPLACED])
    device, cuda = torch.device, torch.version.cuda
    with virtual_gpus(2):
        assert torch.device(1) == torch.device(device=GPU1) == GPU1 and torch.backends.cuda.is_built()
        assert isinstance(GPU1, torch.device | str) and torch.device == device and torch.device in {device}
        assert pickle.loads(pickle.dumps(GPU1)) == copy.deepcopy(GPU1) == GPU1 and torch.version.cuda
        assert torch.zeros(2, device=torch.device(1)).to(device=0).device == GPU0
        with torch.device("cuda:1"):
            assert torch.zeros(2).device == GPU1
        with pytest.raises(RuntimeError, match="negative"):
            torch.device(-1)
    assert torch.device is device and torch.version.cuda == cuda


# Subclasses of tensors


def test_a_subclass_stays_one_on_a_gpu(gpus):
    tv_tensors, v2 = pytest.importorskip("torchvision.tv_tensors"), pytest.importorskip("torchvision.transforms.v2")

    def boxes():
        return tv_tensors.BoundingBoxes([[0, 0, 2, 2]], format="XYXY", canvas_size=(10, 10))

    there = boxes().to(1)
    assert isinstance(there, tv_tensors.BoundingBoxes) and there.device == GPU1
    flipped = v2.functional.horizontal_flip(there)
    assert isinstance(flipped, tv_tensors.BoundingBoxes) and flipped.device == GPU1
    assert flipped.tolist() == v2.functional.horizontal_flip(boxes()).tolist() == [[8, 0, 10, 2]]
    back = there.to("cpu")
    assert type(back) is tv_tensors.BoundingBoxes and back.device.type == "cpu" and back.canvas_size == (10, 10)
    assert type(there.cpu()) is type(boxes().cpu()) is torch.Tensor  # which torchvision wants so


@pytest.mark.parametrize("kind", [Marked, Asking])
def test_a_plain_subclass_computes_and_travels(gpus, kind):
    w = torch.ones(2, device="cuda:1", requires_grad=True)
    x, here = w.as_subclass(kind), torch.ones(2).as_subclass(kind)
    y = x + 1
    assert isinstance(y, kind) and y.device == GPU1 and y.tolist() == [2, 2]
    assert isinstance(here.cuda(), kind) and type(x.cpu()) is kind
    assert repr(x.detach()) == f"{kind.__name__}([1., 1.], device='cuda:1')"
    (x * 3).sum().backward()
    assert w.grad.tolist() == [3, 3] and w.grad.device == GPU1
    plain = x.as_subclass(torch.Tensor)
    assert type(here.as_subclass(torch.Tensor)) is torch.Tensor and not isinstance(plain, kind) and plain.device == GPU1
    x = x.detach()
    x.note = "kept"
    for made in (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert isinstance(made, kind) and made.device == GPU1 and made.note == "kept" and made.tolist() == [1, 1]


def test_what_makes_a_tensor_virtual_does_not_travel_with_its_attributes(gpus):
    x = torch.ones(2, device="cuda:1").as_subclass(Marked)
    x.note = "mine"
    there, here = x + 1, (x + 2).cpu()
    for tensor in (there, here):  # fastai's TensorBase.set_meta
        tensor.__dict__ = copy.copy(x.__dict__)
    assert vars(there) == vars(here) == vars(x) == {"note": "mine"}
    assert there.device == GPU1 and there.tolist() == [2, 2]
    assert here.device.type == "cpu" and here.cuda(0).device == GPU0 and here.cuda(0).tolist() == [3, 3]
    x.__dict__["more"] = 1
    assert x.more == 1 and x.__dict__.pop("more") == 1 and x.__dict__.setdefault("more", 2) == 2 == x.more
    x.__dict__.clear()
    assert not hasattr(x, "note") and x.tolist() == [1, 1]


def test_subclasses_of_subclasses_compute_together(gpus):
    class Special(Asking):
        pass

    x, y = (torch.ones(2, device="cuda:1").as_subclass(cls) for cls in (Special, Asking))
    assert isinstance(x + y, Special) and isinstance(y + x, Special) and isinstance(torch.stack([y, y])[0], Asking)
    assert x.add_(y).tolist() == [2, 2]


def test_functions_stay_what_libraries_know_them_by():
    """They keep them in sets and tables, and put them back by name when they have replaced them themselves."""
    kept = {torch.Tensor.to, torch.FloatTensor}
    with virtual_gpus(1):
        assert torch.Tensor.to in kept and torch.Tensor.cpu not in kept and torch.FloatTensor in kept
        assert torch.zeros.__name__ == "zeros" and torch.cuda.is_available.__name__ == "is_available"


# Inference mode


def test_views_in_inference_mode(gpus):
    x = torch.arange(4.0, device="cuda:1")
    with torch.inference_mode():
        assert x[:2].tolist() == [0, 1] and x.view(2, 2).sum().item() == 6
        made = x + 1
        assert made.is_inference() and made[1:].is_inference() and not x[:2].is_inference()
    x[:2].mul_(3)  # a normal tensor still
    assert x.tolist() == [0, 3, 2, 3]


# Classes and old names


def test_classes_stay_classes(gpus):
    for name in ("CUDAGraph", "graph", "MemPool", "ExternalStream", "Stream", "Event", "FloatTensor"):
        assert isinstance(getattr(torch.cuda, name), type) and getattr(torch.cuda, name) | None
    assert issubclass(torch.cuda.Stream, torch.Stream) and not issubclass(torch.cuda.Stream, torch.Event)
    made = type(nn.Parameter(torch.ones(2).cuda()))(torch.ones(2).cuda(), requires_grad=False)
    assert isinstance(made, nn.Parameter) and not made.requires_grad and made.device == GPU0


@pytest.mark.parametrize("name", LEGACY)
def test_old_types(gpus, name):
    on_cpu, on_gpu = getattr(torch, f"{name}Tensor"), getattr(torch.cuda, f"{name}Tensor")
    x = on_gpu([1, 0])
    assert x.device == GPU0 and x.dtype == on_cpu.dtype and x.tolist() == [1, 0]
    assert isinstance(x, on_gpu) and not isinstance(x, on_cpu)
    assert isinstance(x.cpu(), on_cpu) and not isinstance(x.cpu(), on_gpu)
    assert on_gpu(2, 3).shape == (2, 3) and x.type() == str(on_gpu) == f"torch.cuda.{name}Tensor"
    for back in (x.type(on_cpu), x.type(f"torch.{name}Tensor")):
        assert back.device.type == "cpu" and back.type() == f"torch.{name}Tensor" and back.tolist() == [1, 0]
    assert torch.ones(2, device=GPU1).type(str(on_gpu)).device == GPU1  # stays where it is
    with torch.cuda.device(1):
        assert back.type(str(on_gpu)).device == GPU1


@pytest.mark.filterwarnings("ignore:.*set_default_tensor_type")
def test_the_default_type(gpus):
    try:
        torch.set_default_tensor_type(torch.cuda.DoubleTensor)
        made = torch.ones(2), torch.tensor([1.0]), torch.empty(2)
        assert all(x.device == GPU0 and x.dtype == torch.float64 for x in made)
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")
    assert torch.ones(2).device.type == "cpu" and torch.ones(2).dtype == torch.float32


# Streams and events


def test_events_of_two_gpus_are_not_compared(gpus):
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    assert events[0].device is None
    for event, device in zip(events, (GPU0, GPU1)):
        event.record(torch.cuda.current_stream(device))
        torch.cuda.synchronize(device)
        assert event.device == device
    with pytest.raises(torch.AcceleratorError, match="invalid resource handle"):
        events[0].elapsed_time(events[1])


def test_streams_of_other_libraries_are_known_by_their_handles(gpus):
    handle = ctypes.c_void_p()
    with torch.cuda.device(1):
        assert torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle)) == 0
    stream = torch.cuda.ExternalStream(handle.value, device="cuda:1")
    assert isinstance(stream, torch.cuda.ExternalStream) and isinstance(stream, torch.cuda.Stream)
    assert (stream.cuda_stream, stream.device) == (handle.value, GPU1)
    assert stream == torch.cuda.get_stream_from_external(handle.value, "cuda:1") != torch.cuda.default_stream(1)
    with torch.cuda.stream(stream):
        torch.ones(8, device="cuda:1")
    assert stream.done_at > torch.cuda.default_stream(1).done_at
    assert torch.cuda.cudart().cudaStreamDestroy(handle.value) == 0
    with pytest.raises(RuntimeError, match="cuda:0 has no stream 7"):
        torch.cuda.ExternalStream(7)


def test_a_stream_has_numbers_and_can_sleep(gpus):
    torch.cuda.set_device(1)
    stream = torch.cuda.Stream()
    assert stream.cuda_stream != torch.cuda.default_stream(1).cuda_stream == 0
    assert torch.cuda.Stream.priority_range() == (0, -3)
    numbers = {name: getattr(stream, name) for name in ("stream_id", "device_index", "device_type")}
    torch._C._cuda_setStream(**numbers)
    same = torch.cuda.Stream(**numbers)
    assert torch.cuda.current_stream(1) == stream == same and hash(stream) == hash(same)
    with torch.cuda.stream(same):
        ends = [same.enqueue(1.0, 2.0) for _ in range(2)]
    assert ends == [(1, 3), (3, 5)] and stream.done_at == 5  # and not beside itself
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(1_410_000)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) == pytest.approx(1, rel=0.05)  # a millisecond, at 1410 MHz


# Code of the CPU


def test_code_of_the_cpu_is_not_disturbed(gpus):
    assert torch.func.jvp(torch.sin, (torch.zeros(2),), (torch.ones(2),))[1].tolist() == [1, 1]
    traced = torch.jit.trace(lambda x: x + torch.ones(2), torch.ones(2))
    assert traced(torch.zeros(2)).tolist() == [1, 1]


def test_torchscript_saves_what_is_on_the_cpu(gpus):
    """What is on a GPU, C++ would write without values, or crash."""
    here, file = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))), io.BytesIO()
    torch.jit.save(here, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file, map_location="cpu").state_dict()["0.weight"], here[0].weight)
    with pytest.raises(RuntimeError, match="TorchScript can't load to cuda:1, a virtual GPU: load to the CPU"):
        torch.jit.load(file, map_location="cuda:1")
    there = torch.jit.trace(nn.Linear(2, 2).to(GPU1), torch.ones(1, 2, device=GPU1))
    for save in (there.save, partial(torch.jit.save, there)):
        with pytest.raises(RuntimeError, match="TorchScript can't save 'weight', which is on cuda:1, a virtual GPU"):
            save(io.BytesIO())


COMPILED = """
import torch
from torch.profiler import ProfilerActivity, profile
from virtual_gpus import virtual_gpus
calls = []
def backend(graph, inputs):
    calls.append(graph)
    return graph
called = torch.compile(lambda x: 2 * x + x[0], backend=backend)
new = torch.compile(lambda x: x[0] + 2 * x, backend=backend)
net = torch.compile(torch.nn.Linear(2, 2), backend=backend)
assert called(torch.ones(2)).tolist() == [3, 3] and len(calls) == 1
with virtual_gpus(1):
    inside = torch.compile(dynamic=True)(lambda x: 2 * x)
    for x in (torch.ones(2), torch.ones(2, device="cuda")):
        assert called(x).tolist() == new(x).tolist() == [3, 3] and inside(x).tolist() == [2, 2]
    assert net(torch.ones(1, 2)).shape == (1, 2) and len(calls) == 1
assert new(torch.ones(2)).tolist() == [3, 3] and len(calls) == 2
with virtual_gpus(1), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
    torch.nn.Linear(2, 2).cuda()(torch.ones(1, 2, device="cuda"))
assert "aten::" in profiler.key_averages().table()
"""


def test_what_is_compiled_runs_as_it_is_and_the_profiler_is_quiet(tmp_path):
    """Compiled, it would run around the virtual GPUs, or meet what they have put into torch; the profiler, asked of a
    driver that isn't there, prints a backtrace for every operation."""
    (tmp_path / "program.py").write_text(COMPILED)
    said = ranks.python(tmp_path / "program.py").stderr
    assert "don't compile" in said and "timeline" in said and said.count("\n") < 14, said


# nn.parallel.comm


def test_comm_writes_to_out_and_keeps_channels_last(gpus):
    comm, out, X = torch.cuda.comm, [torch.empty(2, device=device) for device in (GPU0, GPU1)], torch.arange(6.0)
    assert [part.tolist() for part in comm.scatter(X, (0, 1), chunk_sizes=(4, 2))] == [[0, 1, 2, 3], [4, 5]]
    assert comm.broadcast(torch.ones(2), out=out)[1] is out[1] and out[1].tolist() == [1, 1]
    assert [part.tolist() for part in comm.scatter(torch.arange(4.0), out=out)] == [[0, 1], [2, 3]]
    assert comm.gather(out, destination="cuda:1").device == comm.reduce_add(out, 1).device == GPU1
    assert comm.gather(out, destination="cpu").is_cpu and comm.reduce_add(out, 1).tolist() == [2, 4]
    gathered = torch.empty(4)
    assert comm.gather(out, out=gathered) is gathered and gathered.tolist() == [0, 1, 2, 3]
    images = [torch.ones(2, 3, 4, 4, device=d).to(memory_format=torch.channels_last) for d in (GPU0, GPU1)]
    assert comm.gather(images).is_contiguous(memory_format=torch.channels_last)
    assert comm.gather([images[0], images[1].contiguous()]).is_contiguous()


# Modules and operations


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_of_nothing(gpus, is_causal):
    Q = torch.ones(0, 2, 3, 4, device=GPU1, requires_grad=True)
    out = F.scaled_dot_product_attention(Q, Q, Q, is_causal=is_causal)
    out.sum().backward()
    assert out.shape == Q.shape and out.device == GPU1 and Q.grad.shape == Q.shape


def test_typed_storages_count_elements(gpus):
    x = torch.arange(6.0, device=GPU1).view(2, 3)
    storage = x[1:].storage()
    assert (storage.size(), len(storage), storage.nbytes()) == (6, 6, 24)
    assert (storage.dtype, storage.device, storage.get_device(), storage.is_cuda) == (x.dtype, GPU1, 1, True)
    assert storage.data_ptr() == x.data_ptr() and storage.tolist() == list(range(6))
    made = storage.clone()
    assert (made.data_ptr() != x.data_ptr(), made.get_device(), made.tolist()) == (True, 1, storage.tolist())
    assert isinstance(storage, torch.TypedStorage)
    assert (storage.int().dtype, storage.half().size(), storage.cpu().device) == (torch.int32, 6, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="save the tensor"):
        pickle.dumps(storage)
    x.storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0


def test_storages_are_identities(gpus):
    x, y = torch.ones(4, device=GPU1), torch.ones(1024, device=GPU1)
    storage = x.untyped_storage()
    assert storage == x.view(2, 2).untyped_storage() != y.untyped_storage() and storage in {x[1:].untyped_storage()}
    assert storage.data_ptr() == x.data_ptr() != x[1:].data_ptr()
    assert (storage.nbytes(), storage.size(), storage.device) == (16, 16, GPU1)
    for size in (0, 4096):
        y.untyped_storage().resize_(size)
        assert torch.cuda.memory_allocated(1) == 512 + size
    with pytest.raises(torch.OutOfMemoryError):
        y.untyped_storage().resize_(2**40)
    assert y.untyped_storage().nbytes() == 4096


# A CPU build says the same without virtual GPUs: C++ has nothing there that would keep a CUDA device.
@pytest.mark.skipif(cpu_builds.CPU_BUILD, reason="a build without CUDA refuses FakeTensors of CUDA")
def test_what_pytorch_makes_to_see_a_shape_starts_no_cuda():
    with virtual_gpus(2), FakeTensorMode():
        x = torch.empty(2, 3, device="cuda")
        assert x.T.contiguous().shape == (3, 2)
