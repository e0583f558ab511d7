"""How commands run a target over rows: the settings of such calls, and what to say of states that are not finite."""

from typing import Any

import torch


# In place of what a target's own config may say, where commands generate: one row for each prompt, which drafts.
ONE_ROW_EACH: dict[str, Any] = {
    "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False, "use_cache": True,
    "stop_strings": None, "prompt_lookup_num_tokens": None,
}  # fmt: skip


def why_not_finite(dtype: torch.dtype) -> str:
    """Says what to do where a target of this dtype computes numbers that are not finite."""
    cause = "It overflows in float16" if dtype == torch.float16 else "Its weights may be damaged"
    return f"The target's own states are not finite ({dtype}). {cause}: load it in bfloat16 or float32."
