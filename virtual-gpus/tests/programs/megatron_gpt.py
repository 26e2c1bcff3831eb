"""A small GPT of Megatron-core, cut into as many parts and stages as the two arguments say."""

import os
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

parts, stages = map(int, sys.argv[1:])
length, vocabulary = 64, 256
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
parallel_state.initialize_model_parallel(parts, stages)
model_parallel_cuda_manual_seed(0)
config = TransformerConfig(
    **{"num_layers": 2 * stages, "hidden_size": 64, "num_attention_heads": 4},
    **{"tensor_model_parallel_size": parts, "pipeline_model_parallel_size": stages},
    **{"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
    **{"deallocate_pipeline_outputs": True, "finalize_model_grads_func": finalize_model_grads},
    **{"gradient_accumulation_fusion": False, "masked_softmax_fusion": False, "persist_layer_norm": False},
)
first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
layers = get_gpt_layer_local_spec()
net = GPTModel(config, layers, vocabulary, length, pre_process=first, post_process=last).cuda().bfloat16()
model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), net)
optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, bf16=True, use_distributed_optimizer=True), [model])


def forward_step(_, model):
    tokens = torch.randint(vocabulary, (2, length + 1), device="cuda")
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").triu(1)
    losses = model(tokens[:, :-1], torch.arange(length, device="cuda").expand(2, -1), mask, labels=tokens[:, 1:])
    return losses, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})


for _ in range(8):
    model.zero_grad_buffer()
    sizes = {"num_microbatches": 4, "seq_length": length, "micro_batch_size": 2}
    losses = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=None, model=model, forward_only=False, **sizes
    )
    _, norm, _ = optimizer.step()
    if last:
        print(losses[0]["loss"].item(), norm, flush=True)
