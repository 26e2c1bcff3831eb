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
def pipelines_of_one_stage_a_rank(rank, n):
    for schedule in (ScheduleGPipe, Schedule1F1B):
        net = layers(n)
        stage = stage_of(net, rank, rank)
        run(schedule(stage, n_microbatches=4, loss_fn=F.cross_entropy), [stage], net, rank, n)


@check
def pipelines_of_two_stages_a_rank(rank, n):
    for schedule in (ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble):
        net = layers(2 * n)
        stages = [stage_of(net, number, rank) for number in (rank, rank + n)]
        run(schedule(stages, n_microbatches=4, loss_fn=F.cross_entropy), stages, net, rank, n)


@check
def pipelines_that_turn_back(rank, n):
    """In the shape of a V: the first rank has the first stage, and the last."""
    for schedule in (ScheduleZBVZeroBubble, ScheduleDualPipeV):
        net = layers(2 * n)
        stages = [stage_of(net, number, rank) for number in (rank, 2 * n - 1 - rank)]
        run(schedule(stages, n_microbatches=8, loss_fn=F.cross_entropy), stages, net, rank, n)


@check
def pipeline_of_a_traced_network(rank, n):
    net = layers(n)
    X = next(batches())[0]
    split = {f"{i}": SplitPoint.BEGINNING for i in range(1, n)}
    pipe = pipeline(copy.deepcopy(net), mb_args=(X.chunk(4)[0],), split_spec=split)
    stage = pipe.build_stage(rank, torch.device("cuda", rank))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.cross_entropy)
    stage.submod.cuda()
    optimizer = sgd(stage.submod.parameters())
    for X, y in batches():
        optimizer.zero_grad()
        schedule.step(*([X.cuda()] if rank == 0 else []), **({"target": y.cuda()} if rank == n - 1 else {}))
        optimizer.step()
    alone = trained_alone(net)
    for found, expected in zip(stage.submod.parameters(), alone[rank].parameters(), strict=True):
        torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-9, atol=1e-9)
