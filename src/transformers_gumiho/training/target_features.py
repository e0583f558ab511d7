"""What the target contributes to a drafter's training: its states and its output head, both frozen."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from ..commands import UserValueError
from ..generation.verification.target_states import FeatureReader, TargetStates, output_head
from ..internals import CACHE_NAME, has_placement_hook
from ..model.layer_fusion import normalize_lower
from ..model.modeling_gumiho import GumihoModel
from ..model.target_shape import TargetLayers


def add_noise(states: torch.Tensor, noise: float, hidden_size: int) -> torch.Tensor:
    """Adds the recipe's uniform noise to what a drafter reads `(B, T, H_in)`, of width `noise` at 512 tokens."""
    # In float32, as half precision would round it away, and next to states of one size in all layers.
    states = normalize_lower(states.float(), hidden_size)
    return states + (torch.rand_like(states, dtype=torch.float32) - 0.5) * (noise * 512 / states.shape[1])


class OnlineFeatures:
    """
    Runs the frozen target in every step.

    Args:
        target: Any decoder, in any dtype, quantized, split or with adapters; it is frozen in evaluation mode.
        layers: Those that a drafter reads, if not the last states alone.

    Raises:
        ValueError: The target does not have these layers, or is a drafter.
    """

    def __init__(self, target: PreTrainedModel, layers: TargetLayers | None = None):
        if isinstance(target, GumihoModel):
            raise UserValueError("The target is a drafter. Give the model that it drafts for.")
        self.target = target.eval().requires_grad_(False)
        self.config = target.config
        self.layers = layers
        self._reader = FeatureReader(target, layers)
        self.head = output_head(target)
        self._packing_is_checked = False

    @property
    def embedding(self) -> torch.Tensor:
        """The weight of the target's token embedding, `(V or more, H)`."""
        return self.target.get_input_embeddings().weight

    def to(self, device: torch.device) -> None:
        """Moves the target to `device`, unless it was placed when it was loaded (split, offloaded or quantized)."""
        placed = any(getattr(self.target, name, None) for name in ("hf_device_map", "is_quantized"))
        if not placed and not has_placement_hook(self.target):
            self.target.to(device)

    @torch.no_grad()
    def states(self, inputs: dict[str, torch.Tensor]) -> TargetStates:
        """
        Returns the target's states of the `input_ids` `(B, L)` among the `inputs`. With `position_ids`, each row holds
        several texts; raises `ValueError` if the target does not keep them apart.
        """
        input_ids, position_ids = inputs["input_ids"], inputs.get("position_ids")
        if position_ids is not None and not self._packing_is_checked:
            self._check_packing(input_ids.device)
        return self._run(input_ids, position_ids).to(input_ids.device)

    def lm_head(self, like: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the target's output head, from features `(..., H)` of any dtype to logits where `like` is."""
        return lambda features: self.head(features.to(like.dtype)).to(like.device)

    def restricted_to(self, token_ids: torch.Tensor) -> "OnlineFeatures":
        """Returns the same features with the logits of `token_ids` `(K,)` alone."""
        restricted = copy.copy(self)
        restricted.head = output_head(self.target, token_ids)
        return restricted

    def _run(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> TargetStates:
        kwargs: dict[str, Any] = {}
        if position_ids is not None:
            kwargs = {"position_ids": position_ids, "attention_mask": self._packed_mask(position_ids)}
        # In its own dtype, not in that of the drafter's training: these are the states that it has in decoding.
        with torch.autocast(input_ids.device.type, enabled=False):
            return self._reader.read(input_ids, **kwargs)

    def _packed_mask(self, position_ids: torch.Tensor) -> Any:
        # Made here, because not every decoder looks at the positions when it makes its mask.
        like = torch.empty(*position_ids.shape, 1, dtype=self.target.dtype, device=position_ids.device)
        return create_masks_for_generate(
            config=self.config.get_text_config(decoder=True),
            inputs_embeds=like,
            attention_mask=None,
            position_ids=position_ids,
            **{CACHE_NAME: None},
        )

    def _check_packing(self, device: torch.device) -> None:
        """Raises `ValueError` where the second text of a packed row sees the first."""
        tokens = torch.arange(1, 13, device=device)[None] % self.config.get_text_config(decoder=True).vocab_size
        positions = torch.arange(6, device=device)[None]
        alone = self._run(tokens[:, 6:], positions).last.float()
        packed = self._run(tokens, torch.cat((positions, positions), dim=1)).last[:, 6:].float()
        difference = float((packed - alone).norm() / alone.norm())
        if difference > 0.1:  # Rounding in eight bits stays below; another context changes the states by their size.
            raise UserValueError(
                f"{type(self.target).__name__} does not keep packed texts apart: the states of a text change by "
                f"{difference:.0%} when another one is before it in the row. Prepare the dataset with `packing=False`."
            )
        self._packing_is_checked = True
