"""virtual_gpus.checks where each GPU has a process of its own."""

import torch
import torch.distributed as dist
from checking import check, raises
from torch import nn

from virtual_gpus import checks


@check
def all_ranks_get_what_each_has(rank, n):
    w = torch.full((2,), float(rank), device="cuda", requires_grad=True)
    everybody = checks.from_all_ranks({"w": w, "rows": [rank, (torch.tensor(rank),)]})
    for r, part in enumerate(everybody):
        assert part["w"].tolist() == [r, r] and part["w"].is_cpu and not part["w"].requires_grad
        assert part["rows"] == [r, (torch.tensor(r),)]
    assert len(everybody) == n and w.requires_grad and w.device.index == rank


@check
def a_check_fails_on_all_ranks_alike(rank, n):
    """Also on those that have the right numbers."""
    torch.manual_seed(0)
    net = nn.Linear(2, 2).cuda()
    checks.assert_replicas_equal(checks.from_all_ranks(dict(net.named_parameters())))
    with torch.no_grad():
        net.bias += rank == 2
    everybody = checks.from_all_ranks(dict(net.named_parameters()))
    words = "replica 2 differs from replica 0 in 1 of 2 tensors; the first is 'bias', by up to 1"
    raises(AssertionError, words, checks.assert_replicas_equal, everybody)


@check
def files_of_several_ranks_are_found(rank, n):
    def saved_by(*writers):
        def save(path):
            dist.all_reduce(torch.ones(1, device="cuda"))  # ranks may meet in it
            if rank in writers:
                torch.save(torch.arange(rank), f"{path}.{rank}")

        checks.assert_one_rank_saves(save)

    saved_by(0), saved_by(2)
    raises(AssertionError, "of 4 ranks 0 wrote a file", saved_by)
    raises(AssertionError, "of 4 ranks 3 wrote a file (0, 1, 2)", saved_by, 0, 1, 2)
