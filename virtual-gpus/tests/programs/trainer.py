"""A small Llama trained by Transformers' Trainer: with FSDP2 if `fsdp` is among the arguments, else with DDP."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, i):
        tokens = torch.arange(64) + i % 100
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones(64, dtype=torch.int64)}


config = LlamaConfig(
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
)
sharded = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
arguments = TrainingArguments(
    "out",
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 8, "bf16": True},
    **{"logging_steps": 1, "save_strategy": "no", "report_to": "none"},
    **(sharded if "fsdp" in sys.argv else {}),
)
Trainer(LlamaForCausalLM(config), arguments, train_dataset=Texts()).train()
