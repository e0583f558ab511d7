"""The recipes that `compare_recipes.py` compares: what each changes in the drafter and in its training."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

from transformers_gumiho import GumihoConfig, GumihoModel


# Of all drafters of a comparison: by how much their numbers of trained parameters may differ.
SIZE_TOLERANCE = 0.1
TRANSITION_RANK = 64


@dataclass(frozen=True)
class Recipe:
    """
    Attributes:
        config: Fields of the drafter's config.
        training: Fields of `GumihoTrainingArguments`.
        reads_layers: Whether the drafter reads all layers that the feature cache holds, where it holds several.
        needs_layers: Whether it is of no interest where the cache does not.
    """

    config: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    reads_layers: bool = False
    needs_layers: bool = False


_TRANSITION = {"transition_rank": TRANSITION_RANK}
_CROSS_ENTROPY = {"serial_ce_weight": 1.0, "parallel_ce_weight": 1.0, "parallel_ce_start": 0.0}
_OWN_FEATURES = {"unroll_serial_head": True}
_LINEAR = {"linear_start": True}
_ALL = _CROSS_ENTROPY | _OWN_FEATURES | _LINEAR
_SERIAL = {"num_serial_tokens": 7, "num_parallel_heads": 0}
_PARALLEL = {"num_serial_tokens": 1, "num_parallel_heads": 6}

RECIPES: dict[str, Recipe] = {
    "published": Recipe(),
    "transition": Recipe(config=_TRANSITION),
    "layers": Recipe(reads_layers=True, needs_layers=True),
    "cross_entropy": Recipe(training=_CROSS_ENTROPY | {"feature_weight": 0.0}),
    "more_cross_entropy": Recipe(training=_CROSS_ENTROPY),
    "own_features": Recipe(training=_OWN_FEATURES),
    "linear_start": Recipe(training=_LINEAR),
    "transition_and_start": Recipe(_TRANSITION, _LINEAR),
    "all": Recipe(_TRANSITION, _ALL, reads_layers=True),
    # Other divisions into serial and parallel tokens, first with the published losses. Serial tokens beyond the second
    # are of no use without training on own features.
    "all_serial": Recipe(_SERIAL, _OWN_FEATURES),
    "all_parallel": Recipe(_PARALLEL),
    "all_on_serial": Recipe(_SERIAL, _ALL, reads_layers=True),
    "all_on_parallel": Recipe(_PARALLEL | _TRANSITION, _ALL | {"unroll_serial_head": False}, reads_layers=True),
}


def fitted_config(
    recipe: Recipe, target_config: PreTrainedConfig, layer_ids: Sequence[int] | None
) -> tuple[GumihoConfig, int]:
    """
    Returns the config of a recipe's drafter, as large as the published recipe's, and its trained parameters.

    What a recipe adds is taken from the serial layers' MLPs. A drafter without parallel heads has more serial layers.

    Raises:
        ValueError: The recipe needs layers that the cache does not hold, or its drafter cannot be made as large.
    """
    if recipe.needs_layers and layer_ids is None:
        raise ValueError("it reads layers that the feature cache does not hold (`--target_layer_ids`)")
    reads_layers = recipe.reads_layers and layer_ids is not None
    config = recipe.config | ({"target_layer_ids": list(layer_ids or ())} if reads_layers else {})
    aim = num_trained(GumihoConfig.from_target(target_config))
    depths = [2] if config.get("num_parallel_heads", 1) else range(1, 13)
    options = [option for depth in depths if (option := _widths(config, target_config, depth, aim))]
    candidates = [GumihoConfig.from_target(target_config, **config | option) for option in options]
    published = GumihoConfig.from_target(target_config).model.intermediate_size
    # Of those that are as large, the one whose layers are most like the published ones.
    sizes = [(num_trained(candidate), candidate) for candidate in candidates]
    fitting = [pair for pair in sizes if abs(pair[0] / aim - 1) <= SIZE_TOLERANCE]
    if not fitting:
        raise ValueError(f"no drafter of it has about {aim:,} parameters")
    size, chosen = min(
        fitting, key=lambda pair: (abs(pair[1].model.intermediate_size - published), abs(pair[0] - aim))
    )
    return chosen, size


def _widths(
    config: dict[str, Any], target_config: PreTrainedConfig, num_layers: int, aim: int
) -> dict[str, Any] | None:
    """Returns the width of the MLPs with which a drafter of so many serial layers has `aim` parameters."""
    sizes = [
        num_trained(
            GumihoConfig.from_target(target_config, **config, num_hidden_layers=num_layers, intermediate_size=w)
        )
        for w in (8, 16)
    ]
    width = 8 + 8 * round((aim - sizes[0]) / (sizes[1] - sizes[0]))
    return {"num_hidden_layers": num_layers, "intermediate_size": width} if width >= 8 else None


def num_trained(config: GumihoConfig) -> int:
    """Returns a drafter's parameters, without the frozen embedding."""
    with torch.device("meta"):
        drafter = GumihoModel(config)
    return sum(p.numel() for name, p in drafter.named_parameters() if not name.startswith("embed_tokens"))
