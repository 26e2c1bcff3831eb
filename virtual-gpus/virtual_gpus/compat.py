"""What the package needs of PyTorch and PyTorch doesn't promise: every private name, in one place, and what PyTorch
from 2.10 to 2.14 does in another way. With a new release this is what to look at.

All names are in 2.10 already. Those that `patches/` replaces stand there: a patch has the name of what it replaces.
"""

import threading
from types import SimpleNamespace
from typing import Any

import torch
import torch._decomp
import torch._prims_common
import torch._subclasses.fake_tensor
import torch.distributed as dist
import torch.jit._serialization
import torch.nn.parallel
import torch.utils._device
import torch.utils._foreach_utils
import torch.utils.checkpoint
import torch.utils.data._utils.collate
from torch import Tensor, nn
from torch.distributed import ReduceOp, distributed_c10d

# Owners of names that are replaced, or looked up late

C = torch._C  # what torch.cuda and torch.accelerator call
C_nn = torch._C._nn  # functions of torch.nn.functional in C++
VF = torch._VF  # recurrent networks
torch_utils = torch._utils  # how tensors are rebuilt from a file
c10d = torch._C._distributed_c10d  # torch.distributed in C++: Work, the collectives' options, FakeProcessGroup
parallel_functions = nn.parallel._functions  # copies of nn.DataParallel
jit_builtins, jit_recursive, jit_serialization = torch.jit._builtins, torch.jit._recursive, torch.jit._serialization

# Dispatch

Base = C.TensorBase  # methods as C++ has them, also while torch.Tensor's are replaced
TensorMeta = C._TensorMeta  # the class of torch.Tensor
Generator = C.Generator  # for isinstance: torch.Generator is replaced
DispatchKey, DispatchKeySet = C.DispatchKey, C.DispatchKeySet
ExcludeDispatchKeyGuard = C._ExcludeDispatchKeyGuard  # without autocast
ForceDispatchKeyGuard = C._ForceDispatchKeyGuard  # Python again where C++ has turned it off, and the conjugate bit
dispatch_tls_local_include_set = C._dispatch_tls_local_include_set  # what that guard leaves as it is
dispatch_tls_local_exclude_set = C._dispatch_tls_local_exclude_set
AutoDispatchBelowAutograd = C._AutoDispatchBelowAutograd  # for an operation with a backward of its own
DisableTorchDispatch = C._DisableTorchDispatch  # inside, no mode of the program's sees operations on inner tensors
DisableTorchFunctionSubclass = C.DisableTorchFunctionSubclass  # PyTorch's own as_subclass
disabled_torch_function_impl = C._disabled_torch_function_impl  # virtual tensors are not asked at every function
dispatch_has_kernel_for_dispatch_key = C._dispatch_has_kernel_for_dispatch_key  # whether an operation is made of others
TorchDispatchModeKey, get_dispatch_mode = C._TorchDispatchModeKey, C._get_dispatch_mode  # is a FakeTensorMode on?
len_torch_function_stack = C._len_torch_function_stack  # whether there is a mode, as of torch.device("cuda")
get_current_function_mode_stack = torch.overrides._get_current_function_mode_stack  # and which
DeviceContext = torch.utils._device.DeviceContext
device_constructors = torch.utils._device._device_constructors  # the functions that torch.device("cuda") is for
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
disable_current_modes = torch.utils._python_dispatch._disable_current_modes  # for operations on tensors inside
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode  # would start CUDA
OpOverload, OpOverloadPacket = torch._ops.OpOverload, torch._ops.OpOverloadPacket  # operations, for types
HigherOrderOperator = torch._ops.HigherOrderOperator  # torch.cond, flex_attention
decomposition_table = torch._decomp.decomposition_table  # operations in Python, made of others
tree_map_only = torch.utils._pytree.tree_map_only
alert_not_deterministic = torch._prims_common.alert_not_deterministic

# Tensors, modules and autograd

make_wrapper_subclass = Tensor._make_wrapper_subclass  # how a virtual tensor is made
functionalize_unsafe_set = torch._functionalize_unsafe_set  # for C++, which compares storages to see what is a view
swap_tensor_impl = C._swap_tensor_impl  # torch.utils.swap_tensors refuses tensors that a graph holds
tensor_str, add_suffixes = torch._tensor_str._tensor_str, torch._tensor_str._add_suffixes  # repr of the values inside
module_call_impl = nn.Module._call_impl  # to know it on the stack
is_legacy_batchedtensor = C._functorch.is_legacy_batchedtensor  # gradients of is_grads_batched=True
recomputation_hook = torch.utils.checkpoint._recomputation_hook
get_fp32_precision = C._get_fp32_precision_getter  # whether TF32 is allowed, by the older or the newer switches
get_sdp_priority_order = C._get_sdp_priority_order  # which kernels attention may take, and which it likes best
get_flash_sdp_enabled, get_cudnn_sdp_enabled = C._get_flash_sdp_enabled, C._get_cudnn_sdp_enabled
get_math_sdp_enabled, get_mem_efficient_sdp_enabled = C._get_math_sdp_enabled, C._get_mem_efficient_sdp_enabled

# Files, TorchScript, data loaders

rebuild_from_type_v2 = torch._tensor._rebuild_from_type_v2  # tensors of subclasses
package_registry = torch.serialization._package_registry  # who is asked where a storage lies
get_allowed_globals = torch._weights_only_unpickler._get_allowed_globals  # caches functions that are replaced
get_builtin_table = jit_builtins._get_builtin_table  # made once, of PyTorch's own functions
default_collate_fn_map = torch.utils.data._utils.collate.default_collate_fn_map

# torch.cuda

get_device_index = torch.cuda._utils._get_device_index
parse_visible_devices = torch.cuda._parse_visible_devices  # CUDA_VISIBLE_DEVICES
nvml_based_avail = torch.cuda._nvml_based_avail  # PYTORCH_NVML_BASED_CUDA_CHECK
check_bf16_tensor_supported = torch.cuda._check_bf16_tensor_supported  # caches the answer of the GPUs that were there

# torch.nn.parallel and torch.distributed

World = distributed_c10d._World  # the process groups of this process: a dry run has some for each rank
set_thread_isolation_mode = c10d._set_thread_isolation_mode  # the same for their names, in C++
resolve_process_group = c10d._resolve_process_group
get_default_store = distributed_c10d._get_default_store
GlooOptions = dist.ProcessGroupGloo._Options  # threads and network interfaces
register_comm_hook = dist._register_comm_hook  # of DDP

# Attributes that are read on objects and modules: {whose: names}

ATTRIBUTES = {
    torch.ops.aten.add.Tensor: "_schema _op_dk _overloadname",
    Tensor: "_make_subclass _cdata _backward_hooks _post_accumulate_grad_hooks _base _version _reduce_ex_internal "
    "_indices _values _nnz",
    torch.autograd.Variable: "_execution_engine",
    torch.UntypedStorage: "_cdata",
    torch.TypedStorage: "_pickle_storage_type _size _to",
    Generator: "_cdata",
    C.ScriptObject: "_type",
    torch.library.Library: "_destroy",
    torch_utils: "_rebuild_parameter _rebuild_sparse_tensor _rebuild_tensor_v2 _rebuild_tensor_v3",
    torch.utils._foreach_utils: "_foreach_supported_types",
    distributed_c10d: "_world _new_process_group_helper",
    dist.Backend: "_plugins _BackendPlugin",
    dist.ProcessGroup: "_device_types _get_backend _register_backend _set_default_backend _set_group_desc "
    "_set_group_name _start_coalescing _end_coalescing",
    dist.ProcessGroupGloo: "_allgather_base _reduce_scatter_base",
    GlooOptions: "_timeout _threads _devices",
    dist.Reducer: "_rebuild_buckets _run_allreduce_hook _set_static_graph _set_forward_pass_work_handle",
}
# Those that __init__ sets: of nn.Module, autocast, TypedStorage, HigherOrderOperator, and DTensor; and those of
# modules that a program may import later: torch.distributed.tensor and _state_dict_stager
LATER = (
    "_parameters _enabled _untyped_storage _name _local_tensor _api _FromTorchTensor _random _offload_tensor "
    "_sharding_prop _StridedShard"
)

# What a collective reduces by. From 2.15 on ReduceOp.unbox opens the script object that comes to __torch_dispatch__;
# before, the object says its number, and not the factor of PREMUL_SUM: that `patches/older.py` notes on its way.

HAS_UNBOX = hasattr(ReduceOp, "unbox")
OPS = {int(op): op for op in ReduceOp.RedOpType.__members__.values()}
noted = threading.local()  # .factor: that of the PREMUL_SUM which this thread is asking for


def unbox_reduce_op(script_object: torch.ScriptObject) -> Any:
    """What has the `op` and the `factor` of the ReduceOp."""
    if HAS_UNBOX:
        return ReduceOp.unbox(script_object)
    op, factor = OPS[script_object.op()], getattr(noted, "factor", None)
    if op == ReduceOp.PREMUL_SUM and factor is None:
        raise RuntimeError(
            "before PyTorch 2.15 virtual GPUs know the factor of PREMUL_SUM only where a program calls "
            "torch.distributed's functions, not for operations of torch.ops.c10d"
        )
    return SimpleNamespace(op=op, factor=factor)


def call_for_bhqkv(mask_mod: Any, *indices: torch.Tensor) -> torch.Tensor:
    """flex_attention's mask of (batch, head, query, key), which takes many of each at once. Imports much."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention import flex_attention

    with TransformGetItemToIndex():  # before PyTorch 2.11 a mask can't read tensors[index] without it
        return flex_attention._vmap_for_bhqkv(mask_mod, prefix=())(*indices)


# Who makes a process group's backends. From 2.14 on plugins do; before, a chain of ifs in distributed_c10d.

HAS_PLUGINS = hasattr(distributed_c10d, "_create_gloo_process_group")
_ProcessGroupGloo = distributed_c10d.ProcessGroupGloo


def create_gloo(options: Any, backend_options: Any) -> Any:
    """PyTorch's own ProcessGroupGloo."""
    if HAS_PLUGINS:
        return distributed_c10d._create_gloo_process_group(options, backend_options)
    return _ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)


def create_refusing(rank: int, size: int) -> Any:
    """A backend that can do nothing."""
    settings = c10d.FakeProcessGroup.Options()
    settings.error_on_collective = True
    return c10d.FakeProcessGroup._create_internal(rank, size, settings)


HAS_SPLITTING = create_refusing(0, 1).supports_splitting  # from 2.14 on
