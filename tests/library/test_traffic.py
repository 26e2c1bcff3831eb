"""The bytes of the three ways to split a transformer (chapter 11 holds the formulas beside what it counts)."""

import json

from mgpu_lib.traffic import parameters, traffic_table


def test_traffic_table_is_plain_data():
    sizes = {"vocab": 10, "width": 8, "layers": 3, "heads": 4, "kv_heads": 2, "inner": 6}
    table = traffic_table({"small": sizes}, most_gpus=4)
    assert json.loads(json.dumps(table)) == table
    [row] = table
    assert row["limits"] == {"pipeline": "3 layers", "tensor": "2 key-value heads"}
    # By hand, two bytes an activation, four a parameter's gradient: 8,192 tokens cross each cut twice; two all-reduces
    # of the embedding's and the head's width, four in each of three layers, three numbers for the loss; an embedding, a
    # head, a norm, three layers.
    assert row["pipeline"] == [0, 4 * 8192 * 8, 8 * 8192 * 8, None]
    assert row["tensor"] == [0, 4 * 8192 * (14 * 8 + 3), None, None]
    assert parameters(sizes) == 2 * 80 + 8 + 3 * (2 * 8 + 2 * 64 + 2 * 32 + 3 * 48)
    assert row["data"] == [8 * (k - 1) * parameters(sizes) for k in range(1, 5)]
