"""torch.cuda.get_device_properties: what a data sheet says about a GPU, and CUDA about its kind.

A property that stands in neither is missing here, too: asking for it is an error.
"""

import functools
import uuid
from dataclasses import dataclass

KIB, MIB = 2**10, 2**20

# Compute capability: threads, and KiB of shared memory, of a multiprocessor; KiB that one block may ask for.
# CUDA C++ Programming Guide (legacy edition), table 27, "Technical Specifications per Compute Capability". It begins
# at 7.5: 7.0 is from arch_traits.h of NVIDIA's CCCL, whose other rows say the same as the table.
LIMITS = {
    (7, 0): (2048, 96, 96),
    (7, 5): (1024, 64, 64),
    (8, 0): (2048, 164, 163),
    (8, 9): (1536, 100, 99),
    (9, 0): (2048, 228, 227),
    (10, 0): (2048, 228, 227),
}
# MiB of the L2 cache, as CUDA reports it, and bits of the memory's bus. Caches of V100, A100 and H100: l2_cache_size in
# OpenXLA's device descriptions; of a T4: deviceQuery on one, gist Terminus-IMRC/5e4b7782; get_device_properties of an
# RTX 4090 in GitHub chenlb/knowledge, cuda-install-on-windows.md, and of an H200 in ai-bot-pro/achatbot,
# deploy/modal/src/llm/vllm/vlm/skywork_r1v.py. Buses: "memory interface" in the white papers of Volta, Turing, Ampere,
# Ada and Hopper. Both of the L4: fpsbench.com; of the RTX 6000 Ada: its data sheet, and the full AD102 of Ada's white
# paper; of the B200: a query of one in pull request 4002 of pytorch/ao.
L2_CACHE = {
    "V100": 6,
    "T4": 4,
    "L4": 48,
    "RTX4090": 72,
    "RTX6000-Ada": 96,
    "A100-40": 40,
    "A100-80": 40,
    "H100": 50,
    "H200": 60,
    "B200": 126.5,
}
BUS_WIDTH = {
    "V100": 4096,
    "T4": 256,
    "L4": 192,
    "RTX4090": 384,
    "RTX6000-Ada": 384,
    "A100-40": 5120,
    "A100-80": 5120,
    "H100": 5120,
    "B200": 7680,
}


@dataclass(frozen=True)
class DeviceProperties:
    """torch.cuda.get_device_properties(i), of a virtual GPU."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    uuid: uuid.UUID
    max_threads_per_multi_processor: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    clock_rate: int  # kHz
    pci_bus_id: int
    bandwidth: float  # of the memory, bytes per second
    key: str  # of its data sheet
    # the next four are the same for every compute capability (sources: see LIMITS)
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 48 * KIB
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    gcnArchName: str = ""  # of GPUs of another maker

    @property
    def L2_cache_size(self):
        return int(L2_CACHE[self.key] * MIB)

    @property
    def memory_bus_width(self):
        return self.bus_width("memory_bus_width")

    @property
    def memory_clock_rate(self):
        """kHz. Memory moves two bits a cycle on each wire of its bus."""
        return round(self.bandwidth / (2 * self.bus_width("memory_clock_rate") / 8) / 1e3)

    def bus_width(self, name):
        if self.key not in BUS_WIDTH:
            raise AttributeError(f"{name}: the data sheet of the {self.key} has no figure for it")
        return BUS_WIDTH[self.key]

    def __repr__(self):
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid})"
        )


@functools.cache
def properties_of(spec, index, number):
    """The properties of GPU `number` of a machine, whose data sheet is `spec` (a `specs.GPU`), seen as `index`."""
    identity = uuid.uuid5(uuid.NAMESPACE_DNS, f"virtual-{spec.key}-{number}")
    threads, shared, optin = LIMITS[spec.capability]
    return DeviceProperties(
        f"{spec.name} (virtual)",
        *spec.capability,
        spec.memory,
        spec.sm_count,
        identity,
        threads,
        shared * KIB,
        optin * KIB,
        round(spec.frequency / 1e3),
        index,
        spec.bandwidth,
        spec.key,
    )
