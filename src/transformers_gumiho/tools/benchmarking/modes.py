"""The ways of decoding that a benchmark compares."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ...commands import UserValueError
from ...internals import compile_on_every_device
from ...model.modeling_gumiho import GumihoModel
from ..measuring.modes import PLAIN, DecodingMode


COMPILED = ", compiled"
PLAIN_COMPILED = PLAIN.name + COMPILED
PROMPT_LOOKUP = "prompt lookup"
ASSISTED = "assisted generation"
# The setting of transformers' documentation.
PROMPT_LOOKUP_TOKENS = 10


def decoding_modes(
    drafter: GumihoModel,
    draft_model: PreTrainedModel | None = None,
    tree_sizes: Sequence[int] = (),
    compiled: bool = False,
    names: Sequence[str] = (),
) -> list[DecodingMode]:
    """
    Returns ways of decoding, plain first.

    Args:
        drafter: The Gumiho drafter, with the settings to compare.
        draft_model: A small causal language model for transformers' own assisted generation, if any.
        tree_sizes: Numbers of drafted tokens of further trees.
        compiled: Also decode with compiled models and static caches, with the drafter and without.
        names: Names of the ways besides plain decoding; by default all.

    Raises:
        ValueError: A name is unknown.
    """
    gumiho, lookup = {"assistant_model": drafter}, {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
    modes = [PLAIN, DecodingMode(PROMPT_LOOKUP, lookup, max_batch_size=1)]
    if draft_model is not None:
        modes.append(DecodingMode(ASSISTED, {"assistant_model": draft_model}, max_batch_size=1))
    modes.append(DecodingMode("gumiho", gumiho))
    if drafter.generation_config.prompt_lookup_num_tokens:
        modes.append(DecodingMode("gumiho without prompt lookup", gumiho, {"prompt_lookup_num_tokens": None}))
    else:
        modes.append(DecodingMode("gumiho with prompt lookup", gumiho | lookup))
    trees: dict[str, dict[str, Any]] = {"gumiho without FTA": {"full_tree_attention": False}}
    for length in (3, 5, 7):
        if length <= drafter.config.max_draft_depth:
            chain = {"branching_factor": 1, "num_assistant_tokens": length, "tree_depth": length}
            trees[f"chain of {length}"] = chain
    if not drafter.config.is_block:
        trees["serial head only"] = {"tree_depth": drafter.config.num_serial_tokens}
        trees["one serial token"] = {"tree_depth": 1}
    trees |= {f"tree of {size}": {"num_assistant_tokens": size} for size in tree_sizes}
    # A measured `break_even` belongs to the tuned tree.
    modes += [DecodingMode(name, gumiho, {"break_even": None} | settings) for name, settings in trees.items()]
    if compiled:
        static = {"cache_implementation": "static", "compile_config": compile_on_every_device()}
        modes += [DecodingMode(PLAIN_COMPILED, static), DecodingMode(f"gumiho{COMPILED}", gumiho | static)]
    if unknown := set(names) - {mode.name for mode in modes}:
        known = ", ".join(f"'{mode.name}'" for mode in modes)
        raise UserValueError(f"There is no mode {min(unknown)!r}. Choose from {known}.")
    return [mode for mode in modes if mode is PLAIN or not names or mode.name in names]
