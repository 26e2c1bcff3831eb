"""flex_attention on virtual GPUs: values and gradients of ordinary attention, one kernel's memory and time."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from virtual_gpus import dry_run, virtual_gpus

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:virtual GPUs don't compile")
documents = torch.tensor([0] * 70 + [1] * 130)  # of 200 tokens


def causal(batch, head, query, key):
    return query >= key


def in_global_document(batch, head, query, key):
    return documents[query] == documents[key]


def document_causal(documents):
    return lambda batch, head, query, key: (query >= key) & (documents[query] == documents[key])


def soft_cap(score, batch, head, query, key):
    return 5 * torch.tanh(score / 5)


def alibi(slopes):
    return lambda score, batch, head, query, key: score - slopes[head] * (query - key).abs()


PLACES = torch.arange(200)
SAME = documents[:, None] == documents
EARLIER = PLACES[:, None] >= PLACES
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
DISTANCE = SLOPES[:, None, None] * (PLACES[:, None] - PLACES).abs()
EVERYWHERE = torch.ones(200, 200, dtype=torch.bool)


def inputs(key_heads=4):
    torch.manual_seed(0)
    return [torch.randn(2, heads, 200, 8, dtype=torch.float64) for heads in (4, key_heads, key_heads)]


def by_hand(query, key, value, mask=EVERYWHERE, bias=0.0, cap=lambda score: score):
    """Attention of single operations."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = cap(query @ key.mT / query.shape[-1] ** 0.5) - bias
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value


CASES = {  # mask and score as functions of tensors on a device, and the same by hand
    "nothing": (lambda to: {}, {}),
    "causal": (lambda to: {"mask": causal}, {"mask": EARLIER}),
    "documents": (lambda to: {"mask": document_causal(to(documents))}, {"mask": SAME & EARLIER}),
    "a capped score": (lambda to: {"score_mod": soft_cap}, {"cap": lambda score: 5 * torch.tanh(score / 5)}),
    "slopes of heads": (
        lambda to: {"score_mod": alibi(to(SLOPES)), "mask": causal},
        {"bias": DISTANCE, "mask": EARLIER},
    ),
}


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_attention_by_hand(name, key_heads):
    functions, same = CASES[name]
    expected = [x.requires_grad_() for x in inputs(key_heads)]
    out = by_hand(*expected, **same)
    out.square().sum().backward()
    with virtual_gpus(1):
        found = [x.cuda().requires_grad_() for x in inputs(key_heads)]
        options = functions(lambda tensor: tensor.cuda())
        if mask := options.pop("mask", None):
            options["block_mask"] = create_block_mask(mask, None, None, 200, 200, device="cuda")
        virtual = flex_attention(*found, **options, enable_gqa=key_heads != 4)
        virtual.square().sum().backward()
        torch.testing.assert_close(virtual.cpu(), out, rtol=1e-10, atol=1e-12)
        grads = [x.grad.cpu() for x in found]
    torch.testing.assert_close(grads, [x.grad for x in expected], rtol=1e-10, atol=1e-12)


def test_a_mask_may_read_a_variable_of_its_module(monkeypatch):
    query, key, value = inputs()
    with virtual_gpus(1):
        monkeypatch.setitem(globals(), "documents", documents.cuda())
        mask = create_block_mask(in_global_document, None, None, 200, 200, device="cuda")
        found = flex_attention(query.cuda(), key.cuda(), value.cuda(), block_mask=mask).cpu()
    torch.testing.assert_close(found, by_hand(query, key, value, SAME), rtol=1e-10, atol=1e-12)


def test_a_bias_that_is_learned_is_refused():
    with virtual_gpus(1):
        bias = torch.zeros(4, device="cuda", requires_grad=True)
        tensors = [x.cuda() for x in inputs()]
        with pytest.raises(NotImplementedError, match="no gradients for tensors that a score_mod"):
            flex_attention(*tensors, score_mod=lambda score, batch, head, query, key: score + bias[head])


def test_scores_take_no_memory_and_a_mask_saves_time():
    seconds = {}
    for name, mask in (("all", None), ("causal", causal)):
        with virtual_gpus(1, gpu="H100", backing="meta") as machine:
            make = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
            tensors = [torch.randn(1, 2, 2048, 64, **make) for _ in range(3)]
            blocks = mask and create_block_mask(mask, None, None, 2048, 2048, device="cuda")
            held, began = machine.ledgers[0].allocated, machine.elapsed()
            torch.cuda.reset_peak_memory_stats()
            flex_attention(*tensors, block_mask=blocks).sum().backward()
            assert machine.ledgers[0].peak - held < 12 * tensors[0].nbytes < 2 * 2048 * 2048 * 2
            events = [event for event in machine.timeline.events if "attention" in event.name and event.start >= began]
            assert len(events) == 2, "a kernel for each pass"
            seconds[name] = sum(event.flops for event in events)
    assert seconds["causal"] / seconds["all"] == pytest.approx((16 + 1) / (2 * 16))  # 16 blocks of 128 a side


def test_a_plan_knows_documents_that_the_program_makes_and_says_where_it_does_not():
    flops = {}

    def program(random):
        w = nn.Linear(64, 64).cuda()
        tokens = torch.arange(2048, device="cuda")
        ends = (tokens % 512 == 0) if not random else tokens.random_(0, 2) == 0

        def step():
            x = w(torch.zeros(1, 2, 2048, 64, device="cuda"))
            mask = create_block_mask(document_causal(ends.cumsum(0)), None, None, 2048, 2048, device="cuda")
            flex_attention(x, x, x, block_mask=mask).sum().backward()

        return step

    for random in (False, True):
        made = dry_run(lambda random=random: program(random), 2)
        flops[random] = made.flops
        about_masks = [words.partition(" at ")[0] for words in made.assumed if words.startswith("flex_attention")]
        assert about_masks == random * ["flex_attention computes all blocks"]
    assert flops[False] < 0.25 * flops[True]


def test_without_values_a_mask_that_is_unknown_is_refused():
    with virtual_gpus(1, backing="meta"):
        mask = document_causal(documents.cuda() * 1)
        blocks = create_block_mask(causal, None, None, 200, 200, device="cuda")
        blocks.mask_mod = mask
        with pytest.raises(RuntimeError, match="the mask of flex_attention: there are no values here"):
            flex_attention(*[x.cuda() for x in inputs()], block_mask=blocks)


def test_checkpointing_by_operation_sees_flex_attention_and_keeps_it():
    seen = []

    def policy(context, op, *args, **kwargs):
        seen.append(op)
        keeps = op is torch.ops.higher_order.flex_attention
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    with virtual_gpus(1) as machine:
        x = inputs()[0].cuda().requires_grad_()
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        out = checkpoint(lambda x: flex_attention(2 * x, x, x), x, use_reentrant=False, context_fn=contexts)
        out.sum().backward()
        kernels = [event.name for event in machine.timeline.events if "attention" in event.name]
        grad = x.grad.cpu()
    y = inputs()[0].requires_grad_()
    by_hand(2 * y, y, y).sum().backward()
    torch.testing.assert_close(grad, y.grad, rtol=1e-10, atol=1e-12)
    assert torch.ops.higher_order.flex_attention in seen
    assert torch.ops.aten.bmm.default not in seen, "what computes it is not the program's"
    assert kernels == ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"]


@pytest.mark.filterwarnings("ignore:flex_attention in a CUDA graph")
def test_a_mask_may_read_what_is_computed_in_a_cuda_graph():
    """It is an index, and a wrong one before the replay."""
    with virtual_gpus(1, "H100"):
        query, breaks = torch.randn(1, 2, 256, 16, device="cuda"), torch.zeros(256, dtype=torch.int64, device="cuda")
        breaks[100], names, documents = 1, torch.arange(2, device="cuda"), [breaks.cumsum(0)]
        block_mask = create_block_mask(
            lambda batch, head, i, j: names[documents[0][i]] == names[documents[0][j]], 1, None, 256, 256
        )

        def step():
            documents[0] = breaks.cumsum(0)
            return flex_attention(query, query, query, block_mask=block_mask)

        expected, graph = step(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        graph.replay()
        torch.testing.assert_close(out, expected)
