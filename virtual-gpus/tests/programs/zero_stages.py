"""A small network trained by DeepSpeed: its ZeRO stage is the argument."""

import sys

import deepspeed
import torch
from torch import nn

config = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": int(sys.argv[1]), "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
}
deepspeed.init_distributed("nccl")
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
for _ in range(8):
    X, y = torch.randn(8, 64, device=engine.device, dtype=torch.bfloat16), torch.randint(10, (8,), device=engine.device)
    loss = nn.functional.cross_entropy(engine(X).float(), y)
    engine.backward(loss)
    engine.step()
    print(loss.item(), engine.get_global_grad_norm(), flush=True)
