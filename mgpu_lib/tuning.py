"""Batch size and learning rate: scaling rules, warm-up, and the gradient noise scale, also under DDP."""

import math
from numbers import Real

import torch
import torch.distributed as dist

from mgpu_lib.arguments import check_count, check_rate


def linear_scaling(lr, batch_size, new_batch_size):
    """The learning rate for `new_batch_size` if `lr` was right for `batch_size`: k times the batch, k times the rate.

    Batch sizes are in images per step, over all GPUs; the loss is the mean over the batch. As long as the gradient
    hardly changes during k small steps, one large step goes as far. Source: Goyal et al. 2017, section 2.1
    (arXiv:1706.02677), who use warm-up with it. Raises ValueError for numbers that make no sense.

    >>> linear_scaling(0.1, batch_size=256, new_batch_size=1024)
    0.4
    """
    return check_rate("lr", lr) * batch_ratio(batch_size, new_batch_size)


def sqrt_scaling(lr, batch_size, new_batch_size):
    """The learning rate for `new_batch_size`: k times the batch, sqrt(k) times the rate.

    It keeps the variance of a step, which is lr² / batch_size times the variance of one image's gradient. Sources:
    Krizhevsky 2014 (arXiv:1404.5997), who found the linear rule to work better; Hoffer et al. 2017, section 4
    (arXiv:1705.08741). Raises ValueError for numbers that make no sense.

    >>> sqrt_scaling(0.1, batch_size=256, new_batch_size=1024)
    0.2
    """
    return check_rate("lr", lr) * math.sqrt(batch_ratio(batch_size, new_batch_size))


def warmup(step, warmup_steps, lr, start):
    """The learning rate at `step` (0, 1, …): from `start` in a straight line to `lr`, there from `warmup_steps` on.

    Goyal et al. 2017, section 2.2 (arXiv:1706.02677), begin with the rate of the small batch and take five epochs.
    `warmup_steps` 0 means none. Raises ValueError for numbers that make no sense.

    >>> warmup(step=5, warmup_steps=10, lr=0.4, start=0.1)
    0.25
    """
    check_count("step", step, least=0)
    check_count("warmup_steps", warmup_steps, least=0)
    check_rate("lr", lr)
    if not isinstance(start, Real) or not 0 <= start <= lr:
        raise ValueError(f"start is {start!r}: pass a number from 0 to lr, {lr}")
    return lr if step >= warmup_steps else start + (lr - start) * step / warmup_steps


def gradient_noise(gradients, sizes):
    """The noise in the gradient of one step, from its replicas: (|G|², tr Σ), unbiased estimates.

    gradients   one list of tensors per replica, before the all-reduce: the gradient of the MEAN loss over its shard
    sizes       rows in each shard, at least 1; they may differ

    |G|² is the squared length of the true gradient, tr Σ the variance of one row's gradient, summed over all numbers;
    both in units of (loss / parameter)². A single step's estimates scatter widely, and may even be negative: collect
    many, then call `noise_scale`. Source: McCandlish et al. 2018, appendix A.1 (arXiv:1812.06162), with the replicas'
    shards as small batches and all of them as the large one. Raises ValueError for fewer than two replicas.
    """
    if len(gradients) != len(sizes) or len(sizes) < 2:
        raise ValueError(f"{len(gradients)} gradients and {len(sizes)} sizes: pass one of each per replica, at least 2")
    for size in sizes:
        check_count("a size", size, least=1)
    rows = sum(sizes)
    small = sum(squared_norm(gradient) for gradient in gradients) / len(sizes)
    means = (
        sum(size / rows * tensor.double().cpu() for size, tensor in zip(sizes, tensors))
        for tensors in zip(*gradients, strict=True)
    )
    return noise_from_norms(small, squared_norm(means), len(sizes) / sum(1 / size for size in sizes), rows)


class NoiseMeter:
    """Measures the noise in the gradient of each step of `net`, a torch.nn.parallel.DistributedDataParallel.

    After a backward pass the ranks' own gradients are gone. So the meter registers a communication hook, of which `net`
    can have one: it all-reduces each bucket as `net` does without it, and keeps the squared lengths of both gradients.
    Make it before the first backward pass. Each rank's loss must be the mean over its shard.
    """

    def __init__(self, net):
        self.own = self.mean = None
        self.group = net.process_group
        net.register_comm_hook(self, NoiseMeter.reduce)

    def reduce(self, bucket):
        """What the network calls with each bucket of gradients, before they are summed."""
        flat = bucket.buffer()
        if bucket.index() == 0:  # of a new backward pass
            self.own = self.mean = torch.zeros((), dtype=torch.double, device=flat.device)
        self.own = self.own + flat.double().square().sum()
        flat.div_(dist.get_world_size(self.group))
        work = dist.all_reduce(flat, group=self.group, async_op=True)

        def note(future):
            [mean] = future.value()
            self.mean = self.mean + mean.double().square().sum()
            return mean

        return work.get_future().then(note)

    def estimate(self, rows):
        """(|G|², tr Σ) of the last backward pass, as `gradient_noise` gives them, for `rows` of this rank's shard.

        All ranks must call it, and all get the same. Shards may differ in size. The network's gradient is then the
        mean of the shards' means, in which a row of a small shard counts more, and so it is in these estimates. Raises
        ValueError for less than one row, or before the first backward pass.
        """
        check_count("rows", rows)
        if self.own is None:
            raise ValueError("no backward pass yet: make the meter first, then train, then ask for the estimate")
        ranks = dist.get_world_size(self.group)
        numbers = torch.stack([self.own, torch.full_like(self.own, 1 / rows)]) / ranks
        dist.all_reduce(numbers, group=self.group)
        small, inverse = numbers.tolist()
        return noise_from_norms(small, self.mean.item(), 1 / inverse, ranks / inverse)


def squared_norm(tensors):
    return sum(tensor.double().square().sum().item() for tensor in tensors)


def noise_from_norms(small, large, small_batch, large_batch):
    """(|G|², tr Σ) from the squared lengths of gradients of two batch sizes, in rows: see `gradient_noise`.

    A gradient of B rows has the expected squared length |G|² + tr Σ / B: two sizes, two equations. `small` may be a
    mean over several small batches. Source: McCandlish et al. 2018, appendix A.1 (arXiv:1812.06162). Raises ValueError
    unless the large batch is larger and both lengths are finite and not negative.
    """
    if not 0 < small_batch < large_batch < math.inf:
        raise ValueError(f"batches of {small_batch} and {large_batch} rows: the second must be larger than the first")
    if not (0 <= small < math.inf and 0 <= large < math.inf):
        raise ValueError(f"squared lengths {small} and {large}: pass finite numbers that are not negative")
    noise = (small - large) / (1 / small_batch - 1 / large_batch)
    return large - noise / large_batch, noise


def noise_scale(estimates):
    """The simple noise scale tr Σ / |G|², in rows, from many steps' (|G|², tr Σ); see `gradient_noise`.

    At this batch size a gradient holds as much noise as signal. Well below it, k times the batch needs nearly k times
    fewer steps; well above it, nearly as many as before. The means are taken before the ratio, because a ratio of
    noisy numbers is biased. Source: McCandlish et al. 2018, equation 2.9 and appendix A.1 (arXiv:1812.06162). Raises
    ValueError without estimates, and when the mean |G|² isn't positive or the mean tr Σ is negative: more noise than
    these steps average out.
    """
    estimates = list(estimates)
    if not estimates:
        raise ValueError("no estimates: pass a (|G|², tr Σ) for each of many steps")
    signal, noise = (sum(column) / len(estimates) for column in zip(*estimates))
    if not (0 < signal < math.inf and 0 <= noise < math.inf):
        raise ValueError(
            f"the means over {len(estimates)} steps are |G|² = {signal:.3g}, which must be positive, and "
            f"tr Σ = {noise:.3g}, which can't be negative: take more steps, or larger batches"
        )
    return noise / signal


def batch_ratio(batch_size, new_batch_size):
    return check_count("new_batch_size", new_batch_size) / check_count("batch_size", batch_size)
