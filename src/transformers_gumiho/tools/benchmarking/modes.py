"""The ways of decoding that a benchmark compares."""

import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ...commands import UserValueError
from ...internals import compile_on_every_device
from ...model.modeling_gumiho import GumihoModel
from ..measuring.timing import PLAIN, DecodingMode


PROMPT_LOOKUP = "prompt lookup"
GUMIHO = "gumiho"
ASSISTED = "assisted generation"
# The setting of transformers' documentation.
PROMPT_LOOKUP_TOKENS = 10


def decoding_modes(
    drafter: GumihoModel, names: Sequence[str] = (), draft_model: PreTrainedModel | None = None
) -> list[DecodingMode]:
    """
    Returns ways of decoding: plain, then those of these `names`, by default prompt lookup, the `drafter`, and both.
    `draft_model` is the small language model of transformers' own assisted generation.

    Raises:
        ValueError: A name is unknown, `draft_model` is missing, or it is in no mode.
    """
    gumiho, lookup = {"assistant_model": drafter}, {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
    if drafter.generation_config.prompt_lookup_num_tokens:
        other = DecodingMode(f"{GUMIHO} without prompt lookup", gumiho, {"prompt_lookup_num_tokens": None})
    else:
        other = DecodingMode(f"{GUMIHO} with prompt lookup", gumiho | lookup)
    usual = [DecodingMode(PROMPT_LOOKUP, lookup, is_transformers_own=True), DecodingMode(GUMIHO, gumiho), other]
    if (draft_model is not None) != (ASSISTED in names):
        raise UserValueError(f"--modes '{ASSISTED}' and --draft_model belong together: give both or neither.")
    static = {"cache_implementation": "static", "compile_config": compile_on_every_device()}
    known = {mode.name: mode for mode in [PLAIN, *usual]}
    known[ASSISTED] = DecodingMode(ASSISTED, {"assistant_model": draft_model}, is_transformers_own=True)
    for name, arguments in ((PLAIN.name, static), (GUMIHO, gumiho | static)):
        known[f"{name}, compiled"] = DecodingMode(f"{name}, compiled", arguments)
    for name in names or [mode.name for mode in usual]:
        if name not in known and (settings := _tree_settings(drafter, name)) is not None:
            # A measured `break_even` belongs to the tuned tree.
            known[name] = DecodingMode(name, gumiho, {"break_even": None} | settings)
        elif name not in known:
            choices = ", ".join(f"'{choice}'" for choice in [*known, *_trees(drafter), "tree of N", "chain of N"])
            raise UserValueError(f"There is no mode {name!r}. Choose from {choices}.")
    chosen = dict.fromkeys([PLAIN.name, *(names or [mode.name for mode in usual])])
    return [known[name] for name in chosen]


def _tree_settings(drafter: GumihoModel, name: str) -> dict[str, Any] | None:
    """Returns the settings of another tree, by its name; `None` if the drafter has no such tree."""
    sized = re.fullmatch(r"(tree|chain) of ([1-9]\d*)", name)
    if sized is None:
        return _trees(drafter).get(name)
    size = int(sized[2])
    if sized[1] == "tree":
        return {"num_assistant_tokens": size}
    if size > drafter.config.max_draft_depth:
        return None
    return {"branching_factor": 1, "num_assistant_tokens": size, "tree_depth": size}


def _trees(drafter: GumihoModel) -> dict[str, dict[str, Any]]:
    """Returns the settings of trees that lack a part of the method, by their names."""
    trees: dict[str, dict[str, Any]] = {"gumiho without FTA": {"full_tree_attention": False}}
    if not drafter.config.is_block:
        trees["serial head only"] = {"tree_depth": drafter.config.num_serial_tokens}
        trees["one serial token"] = {"tree_depth": 1}
    return trees
