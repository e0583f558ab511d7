"""Tables of what cycles cost, for `cycle_costs`."""

from typing import Any

import torch

from transformers_gumiho.target.machine import machine_name


def make_cost_table(
    root_ms: float = 10.0, node_ms: float = 0.2, draft_ms: float = 4.0, plain_ms: float = 10.0, **entries: Any
) -> dict[str, Any]:
    """Returns a table of this machine for float64, in which each row costs as much as each node."""
    sizes, batches = [0, 8, 64], [1, 4]
    table = {
        "machine": machine_name(torch.device("cpu")),
        "dtype": "float64",
        "batch_sizes": batches,
        "tree_sizes": sizes,
        "verify_ms": [[root_ms + node_ms * ((size + 1) * rows - 1) for size in sizes] for rows in batches],
        "draft_ms": [[draft_ms for _ in sizes] for _ in batches],
        "plain_ms": [plain_ms + node_ms * (rows - 1) for rows in batches],
    }
    return table | entries
