"""A LightningModule with the strategy ddp on two GPUs, and the same batches on one device."""

import lightning
import torch
from checking import batches, network, same_networks, sgd, trained_alone
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data = TensorDataset(*map(torch.cat, zip(*batches(), strict=True)))


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_number):
        X, y = batch
        return torch.nn.functional.cross_entropy(self.net(X), y)

    def configure_optimizers(self):
        return sgd(self.parameters())

    def train_dataloader(self):
        return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))

    def on_train_end(self):
        assert self.trainer.world_size == 2 and self.device == torch.device("cuda", self.global_rank)
        same_networks(self.net, trained_alone(network(), data=list(DataLoader(data, batch_size=8))))


if __name__ == "__main__":
    quiet = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    own_sampler = {"use_distributed_sampler": False}  # Lightning's shuffles
    trainer = lightning.Trainer(
        accelerator="gpu", devices=2, strategy="ddp", max_epochs=1, **own_sampler, **dict.fromkeys(quiet, False)
    )
    trainer.fit(Classifier())
    if trainer.is_global_zero:
        print("ok")
