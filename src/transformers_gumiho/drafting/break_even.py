"""The cost of drafting, estimated from sizes: where it is not measured, it decides when the drafter pauses."""

from torch import nn
from transformers import PreTrainedModel

from ..model.decoding_settings import DraftingSettings
from ..model.modeling_gumiho import GumihoModel
from ..verification.placement import input_device
from ..verification.target_states import find_decoder


# On a CPU a pass over this many nodes takes about twice as long as one over a single token.
NODES_PER_STEP_ON_CPU = 50


def estimate_break_even(
    target: PreTrainedModel, drafter: GumihoModel, settings: DraftingSettings, num_rows: int
) -> float:
    """
    Returns the time of a drafted cycle in steps of plain decoding, as `1 + D / T`: `D` counts the parameters of all
    passes of the drafter in a cycle, `T` those of the target's layers and output head. On a CPU,
    `num_rows * nodes / 50` is added, because a pass takes longer for more tokens. `gumiho tune` measures the value.

    Args:
        target: The target.
        drafter: Its drafter.
        settings: The settings for the batch.
        num_rows: Rows of the batch.
    """
    estimate = 1 + _drafter_parameters(drafter, settings) / _target_parameters(target, drafter)
    if input_device(target).type == "cpu":
        estimate += num_rows * settings.num_assistant_tokens / NODES_PER_STEP_ON_CPU
    return estimate


def _drafter_parameters(drafter: GumihoModel, settings: DraftingSettings) -> int:
    """Counts the parameters that the passes of a cycle read, once per pass."""
    num_serial = min(drafter.config.num_serial_tokens, settings.tree_depth)
    num_heads = settings.tree_depth - num_serial
    vocabulary, config = settings.draft_vocabulary, drafter.config
    text_config = config.get_text_config()
    num_tokens = config.draft_vocab_size or text_config.vocab_size if vocabulary is None else len(vocabulary)
    head = num_tokens * text_config.hidden_size
    # `fc` of an EAGLE-3 head reads the committed tokens alone.
    num_fusions = num_serial + bool(num_heads) if drafter.serial_head.fuses_tokens else 1
    count = num_serial * (_size(drafter.layers) + head) + num_fusions * _size(drafter.fc)
    if num_heads:
        count += head + num_heads * _size(drafter.mlp) // drafter.config.num_parallel_heads
        count += 0 if drafter.transition is None else _size(drafter.transition)
    return count


def _target_parameters(target: PreTrainedModel, drafter: GumihoModel) -> int:
    """Counts the parameters that a step reads: layers and output head. An embedding gives one row per token."""
    text_config = drafter.config.get_text_config()
    modules = (module for module in find_decoder(target).modules() if not isinstance(module, nn.Embedding))
    layers = sum(parameter.numel() for module in modules for parameter in module.parameters(recurse=False))
    return layers + text_config.vocab_size * text_config.hidden_size


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
