"""The parts of a drafter that can be trained alone."""

from torch import nn

from ..model.modeling_gumiho import GumihoModel
from ..user_errors import UserValueError
from .checks import check_is_no_adapter


# The modules of each part.
PARTS = {
    "serial": ("layer_fusion", "input_norm", "fc_norm", "fc", "layers", "norm"),
    "parallel": ("mlp", "transition"),
    "transition": ("transition",),
}


def freeze_all_but(part: str, model: nn.Module, drafter: GumihoModel) -> None:
    """
    Freezes what is not of a `part`, one of `PARTS`.

    Raises:
        ValueError: The drafter has no such part, or is in an adapter, whose files might not hold it.
    """
    check_is_no_adapter(model, "train_only")
    if part == "transition" and drafter.transition is None:
        raise UserValueError(
            "`train_only='transition'` needs a drafter with transitions, and this one has none. Load it with "
            "`GumihoModel.from_pretrained(name, transition_rank=64)`."
        )
    if part == "parallel" and not len(drafter.mlp):
        raise UserValueError(
            "`train_only='parallel'` needs a drafter with parallel heads, and this one has none. Leave `train_only` "
            "out, or make one with `num_parallel_heads`."
        )
    drafter.requires_grad_(False)
    for name in PARTS[part]:
        module = getattr(drafter, name, None)
        if module is not None:
            module.requires_grad_(True)
