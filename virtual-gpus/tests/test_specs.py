"""Data sheets: every figure is checked against others that were read on real machines, or against its neighbors."""

import pytest
import torch

from virtual_gpus import virtual_gpus
from virtual_gpus.clock.specs import GPUS, LINKS, SOURCES, find_gpu, find_link

every_gpu = pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)

# What CUDA's deviceQuery prints on these GPUs: FP32 cores per SM, highest clock of the SMs (GHz), width of the memory
# bus (bits), clock of the memory (MHz, two transfers per tick). From these the peaks of the data sheets follow.
# Then the memory as PyTorch's messages print it on these GPUs (GiB), and as the box has it (GB).
READ = {
    "T4": (64, 1.590, 256, 5001, 14.74, 16),
    "L4": (128, 2.040, 192, 6251, 21.96, 24),
    "V100": (64, 1.530, 4096, 877, 15.75, 16),
    "A100-40": (64, 1.410, 5120, 1215, 39.39, 40),
    "A100-80": (64, 1.410, 5120, 1593, 79.26, 80),
    "RTX4090": (128, 2.520, 384, 10501, 23.64, 24),
    "RTX6000-Ada": (128, 2.505, 384, 10000, 44.43, 48),
    "H100": (128, 1.980, 5120, 2619, 79.11, 80),
    "H200": (128, 1.980, 6144, 3201, 139.80, 141),
    "B200": (128, 1.965, 7680, 3996, 178.36, 180),
}


@every_gpu
def test_peaks_follow_from_cores_and_clocks_and_memory_is_what_pytorch_prints(gpu):
    cores, clock, bits, memory_clock, gib, box = READ[gpu.key]
    assert gpu.fp32 == pytest.approx(gpu.sm_count * cores * 2 * clock * 1e9, rel=0.02)
    assert gpu.bandwidth == pytest.approx(bits / 8 * memory_clock * 1e6 * 2, rel=0.03)
    assert 50 < gpu.power <= 1000 and 2017 <= gpu.launched <= 2026 and GPUS[gpu.key] is gpu
    assert {gpu.pcie, gpu.nvlink} <= {*LINKS, None}
    assert round(gpu.memory / 2**30, 2) == gib and box * 0.9 < gib < box


@every_gpu
def test_what_cuda_says_of_it_is_known(gpu):
    with virtual_gpus(1, gpu.key):
        found = torch.cuda.get_device_properties(0)
    _, clock, bits, memory_clock, *_ = READ[gpu.key]
    assert found.L2_cache_size == 2**20 * gpu.cache > 0 and found.multi_processor_count == gpu.sm_count
    assert (found.major, found.minor) == gpu.capability and found.warp_size == 32
    assert found.shared_memory_per_block_optin <= found.shared_memory_per_multiprocessor <= 228 * 1024
    assert found.max_threads_per_multi_processor in (1024, 1536, 2048)
    assert found.clock_rate == pytest.approx(1e6 * clock, rel=0.01)
    if gpu.bus is None:
        with pytest.raises(AttributeError, match=f"memory_bus_width: the data sheet of the {gpu.key} has no"):
            found.memory_bus_width  # noqa: B018
    else:
        assert found.memory_bus_width == bits
        assert found.memory_clock_rate == pytest.approx(1e3 * memory_clock, rel=0.03)


@every_gpu
def test_tensor_cores_are_dense_and_match_the_generation(gpu):
    assert gpu.fp16 >= 2 * gpu.fp32
    if gpu.capability < (8, 0):
        assert gpu.tf32 is None and gpu.bf16 is None
    else:
        assert gpu.bf16 == gpu.fp16 == pytest.approx(2 * gpu.tf32, rel=0.03)
        # dense FLOP per SM and clock; GeForce cards halve the rate of sums in FP32
        per_clock = {(8, 0): 2048, (8, 9): 512 if gpu.key == "RTX4090" else 1024, (9, 0): 4096, (10, 0): 8192}
        clock = READ[gpu.key][1] * 1e9
        assert gpu.bf16 == pytest.approx(gpu.sm_count * per_clock[gpu.capability] * clock, rel=0.1)


def test_link_bandwidth_is_one_direction():
    per_direction = {key: round(link.bandwidth / 1e9, 2) for key, link in LINKS.items()}
    nvlinks = {f"nvlink{n}": bandwidth for n, bandwidth in ((2, 150), (3, 300), (4, 450), (5, 900))}
    assert per_direction == {"pcie3": 15.75, "pcie4": 31.51, "pcie5": 63.02, **nvlinks}
    assert all(1e-7 < link.latency < 1e-4 and LINKS[link.key] is link for link in LINKS.values())


def test_every_sheet_says_where_it_comes_from():
    used = {source for gpu in GPUS.values() for source in (gpu.source, gpu.memory_source)}
    used |= {source for link in LINKS.values() for source in (link.source, link.latency_source)}
    assert used == set(SOURCES.values())  # no figure without a source, and no source without a figure
    for key, source in SOURCES.items():
        assert source.key == key and source.title and source.url.startswith("https://")


def test_find_link():
    links = {("V100", "nvlink"): "nvlink2", ("V100", "pcie"): "pcie3", ("V100", "nvlink3"): "nvlink3"}
    links |= {("V100", None): "nvlink2", ("B200", "nvlink"): "nvlink5", ("T4", None): "pcie3"}
    assert {(gpu, key): find_link(key, find_gpu(gpu)).key for gpu, key in links} == links
    with pytest.raises(ValueError, match=r"no link named 'pci'\. Did you mean 'pcie'"):
        find_link("pci", find_gpu("T4"))


@pytest.mark.parametrize(
    ("key", "hints"),
    [("v100", ["V100"]), ("A100", ["A100-40", "A100-80"]), ("rtx 4090", ["RTX4090"]), ("MI300X", []), (None, [])],
)
def test_who_looks_for_what_there_is_not_hears_what_would_do(key, hints):
    with pytest.raises(ValueError) as error:
        find_gpu(key)
    said, _, known = str(error.value).partition("Known: ")
    assert repr(key) in said and all(repr(hint) in said for hint in hints) and all(name in known for name in GPUS)
