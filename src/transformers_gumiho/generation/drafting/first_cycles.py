"""A warning where a drafter that was published elsewhere drafts next to nothing: it may be read wrongly."""

from dataclasses import dataclass

from torch import nn
from transformers.utils import logging

from ...model.modeling_gumiho import GumihoModel
from ..verification.target_memory import memory_of


logger = logging.get_logger(__name__)

# Below this mean over the first cycles, a drafter does not know what its target says. One token is plain decoding.
NUM_CYCLES, FEWEST_TOKENS = 50, 1.1


@dataclass
class FirstCycles:
    """Counts what the first drafted cycles with a drafter commit, in all calls. `source` is where it was read from."""

    source: str
    num_cycles: int = 0
    num_tokens: float = 0.0  # means over the rows

    def observe(self, tokens: float) -> None:
        """Counts a drafted cycle, with the `tokens` that it committed per row, and warns after the last one."""
        if self.num_cycles == NUM_CYCLES:
            return
        self.num_cycles += 1
        self.num_tokens += tokens
        if self.num_cycles == NUM_CYCLES and self.num_tokens < FEWEST_TOKENS * NUM_CYCLES:
            logger.warning(
                f"The drafter that was read from {self.source!r} drafts next to nothing: "
                f"{self.num_tokens / NUM_CYCLES:.2f} tokens per cycle over {NUM_CYCLES} cycles, where plain decoding "
                f"has 1. It may have been quantized, belong to another target or an earlier version of this one, or "
                f"have been trained with other conventions than its config says (for an MTP layer `norm_output`, "
                f"`mtp_reads_normed` and `mtp_state_first` of `GumihoConfig`)."
            )


def first_cycles_of(target: nn.Module, drafter: GumihoModel, source: str) -> FirstCycles:
    """Returns the count of a pair whose drafter was read from `source`."""
    found: FirstCycles = memory_of(target).first_cycles.setdefault(drafter, FirstCycles(source))
    return found
