"""torch.cuda.get_device_properties: what a data sheet says about a GPU, and CUDA's documentation about its kind.

A property that stands in neither is missing here, too: asking for it is an error.
"""

import functools
import uuid

from virtual_gpus.clock.specs import GPU, PER_MULTIPROCESSOR

KIB, MIB = 2**10, 2**20


class DeviceProperties:
    """torch.cuda.get_device_properties(i), of a virtual GPU."""

    # the same for every compute capability (sources: see PER_MULTIPROCESSOR)
    max_threads_per_block, regs_per_multiprocessor, shared_memory_per_block, warp_size = 1024, 65536, 48 * KIB, 32
    is_integrated = is_multi_gpu_board = pci_device_id = pci_domain_id = 0
    gcnArchName = ""  # of GPUs of another maker

    def __init__(self, spec: GPU, index: int, number: int):
        self.key, self.name = spec.key, f"{spec.name} (virtual)"
        self.total_memory, self.multi_processor_count = spec.memory, spec.sm_count
        self.major, self.minor = spec.capability
        self.uuid = uuid.uuid5(uuid.NAMESPACE_DNS, f"virtual-{spec.key}-{number}")
        self.pci_bus_id, self.clock_rate = index, round(spec.frequency / 1e3)  # kHz
        _, threads, shared, optin = PER_MULTIPROCESSOR[spec.capability]
        self.max_threads_per_multi_processor = threads
        self.shared_memory_per_multiprocessor, self.shared_memory_per_block_optin = shared * KIB, optin * KIB
        self.L2_cache_size = int(spec.cache * MIB)
        if spec.bus is not None:
            self.memory_bus_width = spec.bus
            self.memory_clock_rate = round(spec.bandwidth / (2 * spec.bus / 8) / 1e3)  # kHz; two bits a cycle

    def __getattr__(self, name):
        raise AttributeError(f"{name}: the data sheet of the {vars(self).get('key')} has no figure for it")

    def __repr__(self):
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid})"
        )


@functools.cache
def properties_of(spec: GPU, index: int, number: int) -> DeviceProperties:
    """The properties of GPU `number` of a machine, whose data sheet is `spec`, seen as cuda:`index`."""
    return DeviceProperties(spec, index, number)
