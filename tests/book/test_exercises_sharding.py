"""The checks of "Sharding": typical wrong answers are explained, other right ones taken."""

from answers import (  # noqa: F401
    changed,
    function,
    said,
    test_a_wrong_answer_is_explained,
    test_every_exercise_of_the_page_has_wrong_answers,
    test_other_right_answers,
)

SIGNATURES = {
    "ranks_needed": "parameters, memory, stage",
    "sent_bytes": "parameters, k, stage, micro_batches",
    "reshard": "shards, numel, ranks",
    "mesh_groups": "rank, ranks, tensor",
}

NEEDED = """
    import math
    whole = {1: 8, 2: 4, 3: 0}[stage] * parameters
    shared = 16 * parameters - whole
    return math.ceil(shared / (memory - whole)) if memory > whole else math.inf"""
SENT = """
    passes = 1 if stage == 1 else micro_batches
    gathers = 2 * micro_batches if stage == 3 else 1
    return (passes + gathers) * 4 * parameters * (k - 1) // k"""
RESHARD = """
    values = torch.cat(shards)[:numel]
    padding = values.new_zeros(-numel % ranks)
    return list(torch.cat([values, padding]).chunk(ranks))"""
GROUPS = """
    first = rank // tensor * tensor
    return list(range(first, first + tensor)), list(range(rank % tensor, ranks, tensor))"""

WRONG = [
    ("ranks_needed", "return 16 * parameters // memory", "round up"),
    ("ranks_needed", "return -(-16 * parameters // memory)", "which stay whole on every GPU"),
    ("ranks_needed", changed(NEEDED, " if memory > whole else math.inf", ""), "however many there are"),
    ("ranks_needed", changed(NEEDED, "16 * parameters - whole", "16 * parameters"), "Solve (bytes that stay whole)"),
    ("ranks_needed", changed(NEEDED, "math.ceil(shared / (memory - whole))", "shared // (memory - whole)"), "round up"),
    ("sent_bytes", changed(SENT, " * (k - 1) // k", ""), "one part is its own"),
    ("sent_bytes", changed(SENT, "4 * parameters", "parameters"), "has 4 bytes"),
    ("sent_bytes", changed(SENT, "1 if stage == 1 else micro_batches", "micro_batches"), "scattered once, in step()"),
    ("sent_bytes", changed(SENT, "1 if stage == 1 else micro_batches", "1"), "Which collectives belong to a"),
    ("sent_bytes", changed(SENT, "2 * micro_batches if stage == 3", "micro_batches if stage == 3"), "That is 2 times"),
    ("sent_bytes", "return 'many'", "Return a number"),
    ("reshard", "return list(torch.cat(shards).tensor_split(ranks))", "All shards have the same size"),
    ("reshard", changed(RESHARD, "[:numel]", ""), "padding for the old ranks"),
    ("reshard", "return list(torch.cat(shards)[:numel].chunk(ranks))", "instead of"),
    ("reshard", changed(RESHARD, "torch.cat(shards)", "torch.cat(shards[::-1])"), "their order"),
    ("reshard", "return shards", "shards instead of 4"),
    ("reshard", "return [0] * ranks", "a list of tensors"),
    ("mesh_groups", GROUPS.replace("return ", "a, b = ") + "\n    return b, a", "The other way round"),
    ("mesh_groups", "return [rank], [rank]", "2 ranks share a layer"),
    ("mesh_groups", "return [], []", "in both of its groups itself"),
    (
        "mesh_groups",
        "rows = ranks // tensor\n    return list(range(rank % rows, ranks, rows)), [rank]",
        "their numbers follow each other",
    ),
    ("mesh_groups", changed(GROUPS, "range(rank % tensor, ranks, tensor)", "range(ranks)"), "one of every group"),
    ("mesh_groups", "return rank", "Return two lists"),
]
RIGHT = [
    ("ranks_needed", function("ranks_needed", SIGNATURES["ranks_needed"], NEEDED)),
    (
        "ranks_needed",
        """
    def ranks_needed(parameters, memory, stage):
        for k in range(1, 100):
            kept = (4 if stage == 3 else 0) / k + (4 if stage > 1 else 0) / k + 8 / k
            kept += (4 if stage < 3 else 0) + (4 if stage == 1 else 0)
            if kept * parameters <= memory:
                return k
        return -(-16 * parameters // memory) if stage == 3 else float("inf")""",
    ),
    ("sent_bytes", function("sent_bytes", SIGNATURES["sent_bytes"], SENT)),
    ("reshard", function("reshard", SIGNATURES["reshard"], RESHARD)),
    (
        "reshard",
        """
    def reshard(shards, numel, ranks):  # number by number
        size = -(-numel // ranks)
        new = [torch.zeros(size) for _ in range(ranks)]
        for i in range(numel):
            new[i // size][i % size] = shards[i // len(shards[0])][i % len(shards[0])]
        return new""",
    ),
    ("mesh_groups", function("mesh_groups", SIGNATURES["mesh_groups"], GROUPS)),
    (
        "mesh_groups",
        """
    def mesh_groups(rank, ranks, tensor):
        mesh = torch.arange(ranks).view(-1, tensor)
        return mesh[rank // tensor], mesh[:, rank % tensor]""",
    ),
]
