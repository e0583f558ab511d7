"""What a drafter's training refuses: each with its cause and the way out."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ..commands import UserValueError
from ..internals import attention_implementation
from ..model.configuration_gumiho import GumihoConfig
from ..model.modeling_gumiho import GumihoModel, unwrap_drafter
from ..model.target_shape import state_width
from .arguments import PARTS
from .collator import GumihoDataCollator
from .feature_cache import CachedFeatures, FeatureDataset, TargetFeatures, located, rows_without_states
from .losses.positions import WHAT_COUNTS, count_positions


# What two caches must have in common for one training.
_SAME_OF_CACHES = ("model", "tokenizer", "dtype", "target_layer_ids", "is_last_normed")
logger = logging.get_logger(__name__)


def drafter_of(model: nn.Module) -> GumihoModel:
    """Returns the drafter in `model`; raises `TypeError` where there is none."""
    drafter = unwrap_drafter(model)
    if drafter is None:
        raise TypeError(f"`model` must be a GumihoModel, or a PeftModel around one, got {type(model).__name__}.")
    return drafter


def check_is_trained_here(config: GumihoConfig) -> None:
    """Raises `ValueError` for a drafter whose training is another one, on any data, recorded traffic included."""
    if config.is_block:
        raise UserValueError(
            f"{config.converted_from or config.name_or_path!r} is a block drafter, which is not trained here. Train "
            f"it with SpecForge, DeepSpec or speculators, or leave `drafter` out to make one of another kind."
        )


def check_drafter(drafter: GumihoModel, features: TargetFeatures) -> None:
    """Raises `ValueError` for a drafter that was not made for this target, or that reads other layers of it."""
    check_is_trained_here(drafter.config)
    config, target_config = drafter.config.get_text_config(), features.config.get_text_config(decoder=True)
    read_size, hidden_size = drafter.config.target_hidden_size or config.hidden_size, state_width(target_config)
    if (read_size, config.vocab_size) != (hidden_size, target_config.vocab_size):
        raise UserValueError(
            f"The drafter has hidden size {read_size} and {config.vocab_size} tokens, the target {hidden_size} and "
            f"{target_config.vocab_size}. Make a drafter for it with `GumihoModel.from_target(target)`."
        )
    layers = drafter.config.layers_read(features.config)
    if layers is not None and features.layers != layers:
        ids, found = list(layers.ids), features.layers
        raise UserValueError(
            f"The drafter reads the target's layers {ids} (`target_layer_ids`), and the features are of "
            f"{'the last one alone' if found is None else list(found.ids)}. Extract them with "
            f"`target_layer_ids={ids if layers.is_last_normed else 'drafter.config.layers_read(target.config)'}`."
        )
    implementation = attention_implementation(drafter.config)
    if implementation not in ("eager", "sdpa"):
        raise UserValueError(
            f"The drafter's attention is {implementation!r}, which takes no mask. Load it with "
            f"`attn_implementation='sdpa'`."
        )
    if any(p.requires_grad and p.dtype in (torch.float16, torch.bfloat16) for p in drafter.parameters()):
        logger.warning(
            "The drafter's trained parameters are in half precision, in which small updates are lost. Train "
            "`drafter.float()`, with `bf16=True` for speed."
        )


def check_collator(collator: Any, assistant_only_loss: bool) -> None:
    """Raises `ValueError` where prompts shall count and `collator` does not know of that."""
    if not assistant_only_loss and not isinstance(collator, GumihoDataCollator):
        raise UserValueError(
            f"`assistant_only_loss=False` needs a GumihoDataCollator, got a {type(collator).__name__}. Let it return "
            f"a `loss_mask` of ones instead."
        )


def check_rows(dataset: Any, features: TargetFeatures) -> None:
    """Raises `ValueError` where cached rows were not made as the target's features were."""
    if not isinstance(features, CachedFeatures) or dataset is None or not has_length(dataset):
        return
    wanted = {name: features.made_from.get(name) for name in _SAME_OF_CACHES}
    caches = [holder for holder, _ in located(dataset) if isinstance(holder, FeatureDataset)]
    for manifest in {cache.manifest for cache in caches}:
        manifest.check(wanted, "Give caches that were made as that of `target`.")


def check_something_counts(dataset: Any, collate: Callable[..., Any], shifts: Sequence[int]) -> None:
    """Raises `ValueError` where no row has a state that the loss would count; a stream is not read."""
    if not has_length(dataset):
        return
    for row in rows_without_states(dataset, range(len(dataset))):
        batch = collate([row])
        if count_positions(batch["loss_mask"], shifts, batch.get("position_ids")).any():
            return
    raise UserValueError(f"The training data has no state that counts, so there is nothing to learn. {WHAT_COUNTS}")


def num_positions(drafter: GumihoModel, features: TargetFeatures) -> int | None:
    """Returns the tokens that both drafter and target have positions for; `None` without a limit."""
    configs = (drafter.config.get_text_config(), features.config.get_text_config(decoder=True))
    limits = [getattr(config, "max_position_embeddings", None) for config in configs]
    return min((limit for limit in limits if limit), default=None)


def check_is_no_adapter(model: nn.Module, option: str) -> None:
    """Raises `ValueError` for an adapter, whose files do not hold what `option` changes."""
    if not isinstance(model, GumihoModel):
        raise UserValueError(
            f"`{option}` changes a GumihoModel itself, got a {type(model).__name__}. Merge its adapters first "
            f"(`merge_and_unload()`), or leave `{option}` out."
        )


def check_starts_linearly(model: nn.Module, drafter: GumihoModel) -> None:
    """Raises `ValueError` where a serial head cannot begin as a linear map."""
    check_is_no_adapter(model, "linear_start")
    if drafter.config.is_eagle3:
        raise UserValueError(
            "`linear_start` is for a serial head that predicts states of the target, and that of EAGLE-3 predicts "
            "none. Leave it out."
        )


def freeze_all_but(part: str, model: nn.Module, drafter: GumihoModel) -> None:
    """
    Freezes what is not of a `part`, one of `PARTS`. Raises `ValueError` for a drafter that has no such part, or that
    is in an adapter.
    """
    check_is_no_adapter(model, "train_only")
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(name.startswith(tuple(f"{module}." for module in PARTS[part])))
    if not any(parameter.requires_grad for parameter in drafter.parameters()):
        raise UserValueError(
            f"`train_only={part!r}` needs a drafter that has this part. Load it with `num_parallel_heads` or "
            f"`transition_rank=64`, or leave `train_only` out."
        )


def count_broken(drafter: nn.Module) -> torch.Tensor:
    """Returns how many numbers of the trained parameters that this process holds are not finite."""
    counts = []
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            # FSDP and ZeRO-3 split parameters.
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            counts.append((~torch.isfinite(getattr(local, "ds_tensor", local).detach())).sum())
    return torch.stack(counts).sum()
