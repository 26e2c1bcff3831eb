"""Pipelines: a network in stages, one or two on each rank, and every schedule that PyTorch has for them."""

import copy

import torch
from checking import batches, check, sgd, trained_alone
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)

F = nn.functional


def layers(count):
    torch.manual_seed(0)
    inside = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(count - 1)]
    return nn.Sequential(*inside, nn.Linear(5, 3)).double()


def stage_of(net, number, rank):
    """Stage `number`, which is one layer of `net`."""
    return PipelineStage(copy.deepcopy(net[number]).cuda(), number, len(net), torch.device("cuda", rank))


def run(schedule, stages, net, rank, n):
    """Some steps of the schedule; then each stage must be as that layer of the whole network, and so must the loss."""
    optimizers = [sgd(stage.submod.parameters()) for stage in stages]
    first, last = (any(getattr(stage, place) for stage in stages) for place in ("is_first", "is_last"))
    losses = []
    for X, y in batches():
        for optimizer in optimizers:
            optimizer.zero_grad()
        given, wanted = [X.cuda()] if first else [], {"target": y.cuda(), "losses": losses} if last else {}
        schedule.step(*given, **wanted)
        for optimizer in optimizers:
            optimizer.step()
    alone = trained_alone(net)
    for stage in stages:
        for found, expected in zip(stage.submod.parameters(), alone[stage.stage_index].parameters(), strict=True):
            torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-9, atol=1e-9)
    assert not last or all(loss.is_cuda for loss in losses)


@check
def pipelines(rank, n):
    """Of one stage a rank; of two; and of two in the shape of a V: the first rank has the first stage, and the last."""
    straight, double, turned = (rank,), (rank, rank + n), (rank, 2 * n - 1 - rank)
    for schedule, numbers, micro_batches in (
        (ScheduleGPipe, straight, 4),
        (Schedule1F1B, straight, 4),
        (ScheduleInterleaved1F1B, double, 4),
        (ScheduleLoopedBFS, double, 4),
        (ScheduleInterleavedZeroBubble, double, 4),
        (ScheduleZBVZeroBubble, turned, 8),
        (ScheduleDualPipeV, turned, 8),
    ):
        if numbers is turned and torch.__version__ < "2.13":
            continue  # the last rank, which has the stages at the turn, sends to itself
        net = layers(len(numbers) * n)
        stages = [stage_of(net, number, rank) for number in numbers]
        given = stages if len(stages) > 1 else stages[0]
        run(schedule(given, n_microbatches=micro_batches, loss_fn=F.cross_entropy), stages, net, rank, n)


@check
def pipeline_of_a_traced_network(rank, n):
    net = layers(n)
    X = next(batches())[0]
    split = {f"{i}": SplitPoint.BEGINNING for i in range(1, n)}
    pipe = pipeline(copy.deepcopy(net), mb_args=(X.chunk(4)[0],), split_spec=split)
    stage = pipe.build_stage(rank, torch.device("cuda", rank))
    stage.submod.cuda()
    run(ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.cross_entropy), [stage], net, rank, n)
