"""The formulas of a plan: what each GPU of a large training run holds, and how long a step takes.

They follow from what the program does (`experiments/planned_runs.py`); rates and links are those of the virtual GPUs'
clock: see `plan_rates.constants`. The page of the planner runs them, too: `widgets/javascript.py` translates this file,
so it keeps to what that takes.
"""

from typing import NamedTuple

PARTS_OF_MEMORY = "parameters", "gradients", "optimizer", "activations", "buffers"
PARTS_OF_STEP = "compute", "recomputation", "tensor parallel", "data parallel", "bubble", "update"
PER_NODE = 8
LARGEST = 16_384  # GPUs of a plan
WIDEST_HEAD = 256  # numbers; wider ones are computed step by step, with all weights of attention in memory
# Part of a GPU's memory that a plan may fill. Real runs hold more than is counted here: CUDA itself, NCCL's buffers,
# what PyTorch's allocator has reserved. In recorded/run_validation.json it is typically 1.4 times as much.
ROOM = 0.7


class TrainingRun(NamedTuple):
    """A model, the GPUs, and how the one is split over the others.

    sizes      {"vocab", "width", "layers", "heads", "kv_heads", "inner"}, as mgpu.LLAMA has them
    gpu        one of plan_rates.NODES, in machines of eight that are joined by `network`
    tensor     GPUs that share each matrix, and tokens between matrices; neighbors
    pipeline   stages, each of equally many layers. All other GPUs have other parts of the batch
    zero       what those don't all keep: see ZERO. 0 and 1 as in Megatron-LM, 2 and 3 as with `fully_shard`
    batch      sequences of `seq_len` tokens in a step, of which a GPU takes `micro_batch` at a time
    recompute  whether of each layer only its input is kept, and the rest computed once more
    """

    sizes: dict
    gpu: str = "H100"
    n_gpus: int = 64
    network: str = "InfiniBand NDR"
    tensor: int = 1
    pipeline: int = 1
    zero: int = 3
    micro_batch: int = 1
    batch: int = 512
    seq_len: int = 8192
    recompute: bool = False

    @property
    def data(self):
        """GPUs that have the same part of the model."""
        return self.n_gpus // (self.tensor * self.pipeline)

    @property
    def micro_batches(self):
        """How many of them a GPU takes in a step."""
        return self.batch // (self.data * self.micro_batch)


class Plan(NamedTuple):
    """What `plan` returns. All times are modelled."""

    run: TrainingRun
    memory: dict  # bytes of each kind on the fullest GPU, by PARTS_OF_MEMORY
    capacity: int  # bytes that a GPU has
    peak: float  # its FLOP per second in bfloat16, as the data sheet has it
    seconds: dict  # of a step, by PARTS_OF_STEP
    flops: int  # of the model in a step, on all GPUs, without what is computed once more

    @property
    def held(self):
        """Bytes on the fullest GPU."""
        return sum(self.memory.values())

    @property
    def fits(self):
        """Whether it leaves as much room as real runs have needed: see ROOM."""
        return self.held <= ROOM * self.capacity

    @property
    def step(self):
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self):
        """Of each GPU."""
        return self.run.batch * self.run.seq_len / self.step / self.run.n_gpus

    @property
    def mfu(self):
        """Model FLOPs utilization."""
        return self.flops / self.step / (self.run.n_gpus * self.peak)

    def __repr__(self):
        held = f"{self.held / 2**30:.1f} of {self.capacity / 2**30:.1f} GiB on a GPU"
        fits = "" if self.fits else ", too much" if self.held > self.capacity else ", with little room"
        return f"<{held}{fits}, {self.step:.3f} s per step, {self.mfu:.0%} MFU (modelled)>"


def sizes_of(layers, width, heads):
    """Of a model like Llama 3."""
    inner, kv_heads = width * 7 // 2, min(8, heads)
    return {"vocab": 128_256, "width": width, "layers": layers, "heads": heads, "kv_heads": kv_heads, "inner": inner}


def planned(run, rates):
    """The Plan of a TrainingRun that there can be."""
    return Plan(
        run=run,
        memory=held(run),
        capacity=rates["memory"],
        seconds=time_of_step(run, rates),
        flops=model_flops(run),
        peak=rates["peak"],
    )


def fault(run):
    """What is wrong with a split, in words; None if there can be such a run."""
    tensor, pipeline, data, sizes = run.tensor, run.pipeline, run.data, run.sizes
    if tensor * pipeline * data != run.n_gpus or data == 0:
        return f"tensor={tensor} × pipeline={pipeline} does not divide n_gpus={run.n_gpus}"
    if not (run.n_gpus <= LARGEST and (run.n_gpus % PER_NODE == 0 or PER_NODE % run.n_gpus == 0)):
        return f"n_gpus={run.n_gpus}: 1, 2, 4, or whole machines of {PER_NODE}, and at most {LARGEST}"
    if not (tensor % PER_NODE == 0 or PER_NODE % tensor == 0):
        return f"tensor={tensor}: 1, 2, 4, or whole machines of {PER_NODE}"
    if sizes["heads"] % tensor or sizes["width"] % sizes["heads"]:
        return f"tensor={tensor}: {sizes['heads']} heads can't be shared by so many, or the width by the heads"
    if sizes["width"] > WIDEST_HEAD * sizes["heads"]:
        return f"heads={sizes['heads']}: PyTorch's fast attention takes heads of {WIDEST_HEAD} numbers at most"
    if sizes["layers"] % pipeline:
        return f"pipeline={pipeline}: {sizes['layers']} layers don't make so many equal stages"
    if run.seq_len % tensor:
        return f"tensor={tensor}: {run.seq_len} tokens can't be shared by so many"
    if run.batch % (data * run.micro_batch):
        return f"batch={run.batch}: not a multiple of {data} × {run.micro_batch}, data parallel × micro_batch"
    if run.zero > 1 and pipeline > 1:
        return f"zero={run.zero} with pipeline={pipeline}: each micro-batch would send all gradients; use 0 or 1"
    return None


# The model


class Share(NamedTuple):
    """What one GPU has of a layer and of the two ends: numbers per token, and parameters."""

    tokens: int  # of a micro-batch
    width: int
    part: float  # of the width, between matrices, where tokens are split
    heads: float  # numbers in its heads' queries
    kv: float  # and in keys, as in values
    inner: float
    vocab: float
    layers: int  # of a stage

    @property
    def layer(self):
        """Parameters of a layer."""
        return self.width * (2 * self.heads + 2 * self.kv + 3 * self.inner) + 2 * self.width

    @property
    def table(self):
        """Parameters of the embedding, and of the output layer."""
        return self.width * self.vocab


def share(run):
    """The Share of a GPU."""
    sizes, T = run.sizes, run.tensor
    head_width = sizes["width"] // sizes["heads"]
    return Share(
        tokens=run.micro_batch * run.seq_len,
        width=sizes["width"],
        part=sizes["width"] / T,
        heads=sizes["width"] / T,
        kv=-(-sizes["kv_heads"] // T) * head_width,
        inner=sizes["inner"] / T,
        vocab=-(-sizes["vocab"] // T),
        layers=sizes["layers"] // run.pipeline,
    )


def parameters(sizes):
    """How many a model has."""
    kv = sizes["kv_heads"] * (sizes["width"] // sizes["heads"])
    layer = sizes["width"] * (2 * sizes["width"] + 2 * kv + 3 * sizes["inner"] + 2)
    return sizes["layers"] * layer + sizes["width"] * (2 * sizes["vocab"] + 1)


def model_flops(run):
    """Of a step: two for each parameter in a product and each token, causal attention, and twice that backward; there
    attention's kernel repeats a product, which counts, as in PyTorch's flop_counter and in dry runs."""
    sizes, tokens = run.sizes, run.batch * run.seq_len
    products = parameters(sizes) - sizes["width"] * (sizes["vocab"] + 2 * sizes["layers"] + 1)
    attention = 2 * sizes["layers"] * run.seq_len * sizes["width"]
    return 3 * tokens * (2 * products + attention) + tokens * sizes["layers"] * run.seq_len * sizes["width"]


# Memory: bytes


def held(run):
    """Bytes of each kind on the fullest GPU at its peak, by PARTS_OF_MEMORY."""
    mine = share(run)
    first, last = of_stage(run, mine, 0), of_stage(run, mine, run.pipeline - 1)
    return by_part(PARTS_OF_MEMORY, last if sum(last) > sum(first) else first)


def by_part(names, values):
    return {name: value for name, value in zip(names, values)}


def of_stage(run, mine, stage):
    """Bytes of each kind in a stage, in the order of PARTS_OF_MEMORY."""
    first, last = stage == 0, stage == run.pipeline - 1
    n = mine.layers * mine.layer + (first + last) * mine.table
    if run.zero < 2:
        states = 2 * n, 4 * n, 12 * n / (run.data if run.zero else 1)
    else:
        states = 4 * n / run.data, 4 * n / run.data, 8 * n / run.data
    kept = min(run.pipeline - stage, run.micro_batches) * mine.layers * of_layer(run, mine)
    beside, buffers = fullest_moment(run, mine, last)
    return [int(nbytes) for nbytes in (*states, kept + beside, buffers)]


def of_layer(run, mine):
    """Bytes that a layer keeps for its backward pass, from one micro-batch."""
    return 2 * mine.tokens * (mine.part if run.recompute else kept_numbers(mine))


def kept_numbers(mine):
    """Numbers per token that a layer keeps: its input and that of its middle, both also normalized; queries, keys and
    values, the first two also turned; what attention gives; gate and up, the gate's SiLU, and their product."""
    return 4 * mine.part + 3 * mine.heads + 3 * mine.kv + 4 * mine.inner


def fullest_moment(run, mine, last):
    """When most may be held: in the backward pass of a layer, or at the loss, with logits in 16 bits and in 32. Of it
    (bytes of activations beside those that layers keep, bytes that `fully_shard` has whole at that time)."""
    again = kept_numbers(mine) if run.recompute else 0
    # At the end of the backward pass, gradients of the output layer wait for those of the embedding. A layer's are
    # copied to 32 bits, to be sent; dry runs have between none and all of that at the fullest moment: taken for half.
    backward = 2 * mine.tokens * (5 * mine.inner + again), whole_bytes(run, mine, 3, 2.5 + run.recompute)
    loss = 6 * mine.tokens * mine.vocab, whole_bytes(run, mine, 2, 1)
    return loss if last and sum(loss) > sum(backward) else backward


def whole_bytes(run, mine, tables, layers):
    """What `fully_shard` has whole, in 16 bits: so many tables and layers, and in stage 2 all layers beside."""
    if run.zero < 2:
        return 0
    return 2 * (tables * mine.table + (layers + (mine.layers if run.zero == 2 else 0)) * mine.layer)


# Time: seconds


def time_of_step(run, rates):
    """Of a step, by PARTS_OF_STEP. The bubble is where stages wait for each other, their messages included."""
    mine = share(run)
    forward, backward = layer_forward(run, mine, rates), layer_backward(run, mine, rates)
    ends = [both_ends(run, mine, rates, stage == 0, stage == run.pipeline - 1) for stage in range(run.pipeline)]
    again = forward if run.recompute else (0, 0)
    work = [mine.layers * (forward[0] + backward[0]) + computing for computing, talking in ends]
    talk = [mine.layers * (forward[1] + backward[1]) + talking for computing, talking in ends]
    stages = [a + b + mine.layers * sum(again) for a, b in zip(work, talk)]
    whole = pipeline_time(run, mine, rates, stages)
    mean = [run.micro_batches * sum(part) / run.pipeline for part in (work, talk)]
    recomputed = run.micro_batches * mine.layers * again[0]
    talked = mean[1] + run.micro_batches * mine.layers * again[1]
    exposed = sharded_time(run, mine, rates) if run.zero > 1 else unsharded_time(run, mine, rates)
    bubble = whole - mean[0] - talked - recomputed if run.pipeline > 1 else 0.0
    return by_part(PARTS_OF_STEP, (mean[0], recomputed, talked, exposed, bubble, update_time(run, mine, rates)))


def pipeline_time(run, mine, rates, stages):
    """A step of all micro-batches through `stages`, each with its seconds for one of them, there and back (1F1B)."""
    hops, nodes = run.pipeline - 1, -(-run.n_gpus // PER_NODE)
    far = min(hops, nodes - 1)  # from the last stage of a node to the next one
    ways = [rates["collectives"]["send"][where] for where in ("near", "far")]
    near, across = [begin + each * 2 * mine.tokens * mine.part for begin, each in ways]
    sent = 2 * ((hops - far) * near + far * across)
    return sum(stages) + (run.micro_batches - 1) * max(stages) + sent


def product_time(rates, rows, inner, columns):
    """(rows, inner) times (inner, columns)."""
    results = rows * columns
    alone = rates["fixed product"] + 2 * results * inner / rates["rate"] * (1 + rates["half"] / results)
    waiting = min(rates["most"], rates["waiting"] / results) if rates["taken"] else 0.0
    return alone * (1 + max(rates["taken"], waiting))


def memory_time(rates, nbytes, kernels, kind="pointwise"):
    """So many kernels that read and write so many bytes."""
    return (kernels * rates["fixed"] + nbytes / rates[kind]) * (1 + rates["beside"][kind] * rates["taken"])


def collective_time(rates, run, kind, nbytes, ranks, stride):
    """An all-gather or a reduce-scatter ("gather"), or an all-reduce ("reduce"), of every stride-th GPU."""
    if ranks == 1:
        return 0.0
    here = in_a_node(ranks, stride)
    begin, each = rates["collectives"][f"{here} × {ranks // here}"][kind]
    return begin + each * nbytes


def in_a_node(ranks, stride):
    """How many of these ranks, every stride-th GPU, a node has."""
    return min(ranks, max(1, PER_NODE // stride))


def layer_products(mine):
    """(inner, columns) of a layer's four products."""
    return [
        (mine.width, mine.heads + 2 * mine.kv),
        (mine.heads, mine.width),
        (mine.width, 2 * mine.inner),
        (mine.inner, mine.width),
    ]


def attention_time(run, mine, rates, products):
    """Causal attention: for each token and number seq_len FLOPs a product, of which there are 2 forward, 5 backward."""
    flops = products * mine.tokens * run.seq_len * mine.heads
    alone = rates["fixed product"] + flops / rates["attention"] * (1 + rates["attention half"] / run.seq_len)
    return alone * (1 + rates["taken"])


def beside(rates, ranks, stride):
    """The rates of kernels beside a collective of every stride-th GPU, which takes multiprocessors from them."""
    here = in_a_node(ranks, stride)
    near, far = rates["collectives"]["channels"][here]
    channels = near if ranks == here else far
    return {**rates, "taken": channels / (rates["multiprocessors"] - channels)}


def beyond(talking, computing, slowed):
    """Seconds that a collective adds to what is computed beside it, which alone takes `computing` and all beside it
    `slowed`: those that stay uncovered, or that it takes from the kernels."""
    return max(talking - computing, talking * (1 - computing / slowed))


def layer_forward(run, mine, rates):
    """(seconds of computing, of talking alone) of a layer and a micro-batch."""
    t = 2 * mine.tokens  # bytes of a number for each token
    numbers = 10 * (mine.heads + mine.kv) + 5 * mine.inner + 6 * mine.part
    computing = sum(product_time(rates, mine.tokens, *sizes) for sizes in layer_products(mine))
    computing += attention_time(run, mine, rates, 2)
    computing += memory_time(rates, t * numbers, 25) + memory_time(rates, t * 4 * mine.part, 2, "norm")
    return computing, 4 * collective_time(rates, run, "gather", t * mine.width, run.tensor, 1)


def layer_backward(run, mine, rates):
    """The same backward. Before a product of a column-parallel layer, tokens are gathered behind another."""
    t, sizes = 2 * mine.tokens, layer_products(mine)
    to_input = [product_time(rates, mine.tokens, columns, inner) for inner, columns in sizes]
    to_matrix = [product_time(rates, inner, mine.tokens, columns) for inner, columns in sizes]
    numbers = 12 * (mine.heads + mine.kv) + 2 * mine.kv + 13 * mine.inner + 6 * mine.part
    computing = sum(to_input) + sum(to_matrix) + attention_time(run, mine, rates, 5)
    computing += memory_time(rates, t * numbers, 17) + memory_time(rates, t * 10 * mine.part, 2, "norm")
    computing += memory_time(rates, 10 * mine.layer, 6) if run.zero < 2 else 0.0
    gather = collective_time(rates, run, "gather", t * mine.width, run.tensor, 1)
    behind = [hidden_product(run, mine, rates, gather, *sizes[i]) for i in (0, 2)]
    return computing, 2 * gather + sum(behind)


def hidden_product(run, mine, rates, gather, inner, columns):
    """What two gathers add to the two products of a backward pass beside them."""
    shapes = (mine.tokens, columns, inner), (inner, mine.tokens, columns)
    slower = beside(rates, run.tensor, 1)
    return sum(beyond(gather, product_time(rates, *shape), product_time(slower, *shape)) for shape in shapes)


def both_ends(run, mine, rates, first, last):
    """The same, there and back, of the embedding and of the output layer with its loss, where a stage has them."""
    t, computing, talking = 2 * mine.tokens, 0.0, 0.0
    gather = collective_time(rates, run, "gather", t * mine.width, run.tensor, 1)
    if first:
        computing += memory_time(rates, 2 * t * mine.width, 1, "gather") + memory_time(
            rates, 4 * mine.table, 1, "scatter"
        )
        talking += 2 * gather
    if last:
        to_input = product_time(rates, mine.tokens, mine.vocab, mine.width)
        to_matrix = product_time(rates, mine.width, mine.tokens, mine.vocab)
        computing += product_time(rates, mine.tokens, mine.width, mine.vocab) + to_input + to_matrix
        computing += memory_time(rates, t * 12 * mine.part, 2, "norm") + memory_time(
            rates, 52 * mine.tokens * mine.vocab, 8
        )
        talking += gather + hidden_product(run, mine, rates, gather, mine.width, mine.vocab)
    if run.zero < 2:
        computing += memory_time(rates, 10 * (first + last) * mine.table, 1)
    return computing, talking


def fullest(run, mine):
    """Parameters on a GPU of the first stage."""
    return mine.layers * mine.layer + (1 + (run.pipeline == 1)) * mine.table


def unsharded_time(run, mine, rates):
    """Gradients are added up over all GPUs that have other batches, and with ZeRO parameters collected after it."""
    n = fullest(run, mine)
    if run.zero == 0:
        return collective_time(rates, run, "reduce", 4 * n, run.data, run.tensor)
    each = [collective_time(rates, run, "gather", size * n, run.data, run.tensor) for size in (4, 2)]
    return sum(each)


def update_time(run, mine, rates):
    """Norm of the gradients, Adam, and where there are 16-bit parameters their copies."""
    n = fullest(run, mine) / (run.data if run.zero else 1)
    if run.zero < 2:
        bytes_of_all = 4 * fullest(run, mine)
        return memory_time(rates, 20 * n + bytes_of_all, 5) + memory_time(rates, 28 * n, 1, "lists")
    return memory_time(rates, 40 * n, 3, "lists")


def sharded_time(run, mine, rates):
    """What `fully_shard` adds to a step: copies, and collectives as far as computing does not hide them."""

    def gather(n):
        return collective_time(rates, run, "gather", 2 * n, run.data, run.tensor)

    def scatter(n):  # gradients travel in 32 bits
        return collective_time(rates, run, "gather", 4 * n, run.data, run.tensor)

    def copy(n):
        return memory_time(rates, 4 * n, 1)

    layer, tables = mine.layer, 2 * mine.table
    ways = [there_and_back(run, mine, those) for those in (rates, beside(rates, run.data, run.tensor))]
    there, back = zip(*ways)  # alone, and beside collectives
    whole = run.micro_batches * memory_time(rates, 6 * (mine.layers * layer + tables), mine.layers + 1)  # gradients
    times = run.micro_batches if run.zero == 3 else 1  # that parameters are gathered for the forward pass
    whole += times * (gather(tables) + copy(tables) + gather(layer) + mine.layers * copy(layer))
    whole += times * (mine.layers - 1) * beyond(gather(layer), *there)
    behind = scatter(layer) + (gather(layer) if run.zero == 3 else 0.0)  # of a layer, and parameters for another
    if run.zero == 3:
        whole += run.micro_batches * mine.layers * copy(layer)
    whole += run.micro_batches * (mine.layers - 1) * beyond(behind, *back)
    return whole + run.micro_batches * (scatter(layer) + scatter(tables))


def there_and_back(run, mine, rates):
    """Seconds of a layer and a micro-batch in the forward pass, and in the backward pass, each with a copy of it."""
    there, back = (sum(way(run, mine, rates)) for way in (layer_forward, layer_backward))
    copy = memory_time(rates, 4 * mine.layer, 1)
    return there + copy, back + (there if run.recompute else 0.0) + copy
