"""A loop as Accelerate's readers write it, on two ranks, and the same batches on one device."""

import torch
from accelerate import Accelerator
from checking import batches, network, same_networks, sgd, trained_alone
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
assert accelerator.num_processes == 2 and accelerator.device == torch.device("cuda", accelerator.process_index)
net = network()
data = TensorDataset(*map(torch.cat, zip(*batches(), strict=True)))
alone = trained_alone(net, data=list(DataLoader(data, batch_size=8)))

net, optimizer, loader = accelerator.prepare(net, sgd(net.parameters()), DataLoader(data, batch_size=4))
for X, y in loader:
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.cross_entropy(net(X), y))
    optimizer.step()
same_networks(accelerator.unwrap_model(net), alone)
assert accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device)).tolist() == [0, 1]
accelerator.print("ok")
accelerator.end_training()
