"""A step on a napkin: when communication hides behind computing, and what it costs where it can't.

Chapter 14 derives these formulas and holds them against dry runs. Throughout, `flops` is the FLOP per second that a GPU
reaches while it waits for nothing, and `bandwidth` is in bytes per second and direction. Numbers travel in 16 bits, but
gradients of `fully_shard` in 32. What hides is taken to cost nothing; on a real GPU it slows the kernels beside it.
"""


def sharded_step(parameters, tokens, flops, bandwidth):
    """(seconds of computing, seconds of sending) in a step of one micro-batch with ZeRO-3 that recomputes activations.

    A parameter takes 8 FLOPs per token: 2 forward, 2 once more, 4 backward. Into each node it travels forward and
    backward with 2 bytes, and its gradient with 4. `tokens`: of each GPU; `bandwidth`: of all cards of a node.
    """
    return 8 * parameters * tokens / flops, 8 * parameters / bandwidth


def sharding_threshold(flops, bandwidth):
    """The tokens per GPU from which on ZeRO-3 hides what it sends: both parts of `sharded_step` are equal."""
    return flops / bandwidth


def sharded_mfu(best, tokens, threshold):
    """MFU with so many tokens per GPU, where `best` is reached if nothing is waited for."""
    return best * min(1, tokens / threshold)


def hybrid_mfu(best, tokens, threshold):
    """The same with a copy in each node: only gradients leave it, twice 4 bytes, behind the backward pass alone."""
    forward, backward = 2 * tokens, max(6 * tokens, 8 * threshold)
    return best * 8 * tokens / (forward + backward)


def tensor_limit(width, flops, bandwidth):
    """Among how many ranks a matrix is shared when tensor parallelism has halved the speed.

    A layer like Llama's has about 12.5 · width² parameters, and with recomputation adds up activations five times, each
    time 2 · width bytes per token, of which an all-reduce sends 2 (k - 1) / k. Nothing hides that.
    """
    return 1 + 5 * width * bandwidth / flops


def tensor_mfu(best, ranks, limit):
    """MFU if so many ranks share each matrix; `best` if one has it all."""
    return best / (1 + (ranks - 1) / (limit - 1))


def bubble(stages, micro_batches, virtual_stages=1):
    """How much longer a pipeline's step gets, as a part of its work, by 1F1B, interleaved if a rank has several
    `virtual_stages` (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""
    return (stages - 1) / (virtual_stages * micro_batches)


def message_share(width, parameters, flops, bandwidth):
    """Sending between two pipeline stages, as a part of computing: activations and their gradients have 2 · width bytes
    per token each, and a stage of so many `parameters` computes 6 FLOPs for each. Sequence parallelism divides both;
    with tensor parallelism alone each rank sends all of it, and the share is as many times larger."""
    return 4 * width / bandwidth / (6 * parameters / flops)


def ring_threshold(kv_share, flops, bandwidth):
    """The tokens per rank from which on ring attention hides its keys and values, causal and in zigzag order.

    While a block of T tokens meets another, 2 · T² · width FLOPs, the next keys and values arrive, 4 · T · kv_width
    bytes. `kv_share`: kv_width / width, 1/8 for Llama 3 70B.
    """
    return 2 * kv_share * flops / bandwidth


def expert_limit(flops, bandwidth):
    """The inner width of an expert at which its all-to-alls take as long as its matrix products, however many tokens
    it gets: each goes there and back in 2 · width bytes, forward and backward, for 18 · width · inner FLOPs. Other
    work, as of another micro-batch, may still hide them."""
    return 8 / bandwidth * flops / 18
