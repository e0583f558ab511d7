"""The target's output head, which turns hidden states and the drafter's features into logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..internals import runs_as_defined
from ..model.modeling_gumiho import GumihoModel
from ..user_errors import UserValueError
from .kept import kept


LogitsFunction = Callable[[torch.Tensor], torch.Tensor]


def output_head(
    target: PreTrainedModel, token_ids: torch.Tensor | None = None, has_static_addresses: bool = False
) -> LogitsFunction:
    """
    Returns the function from the target's states `(..., H)`, as a [`FeatureReader`] returns them, to its logits
    `(..., V)`: its output projection, and the scaling and capping that some decoders apply. With `token_ids` `(K,)` it
    computes the logits `(..., K)` of these tokens alone; see [`cut_head`].
    """
    head = target.get_output_embeddings()
    if token_ids is not None:
        return scaled_head(cut_head(head, token_ids, has_static_addresses), target.config)
    read = _in_its_dtype(head)
    return scaled_head(_by_rows(read) if is_plain_linear(head) else read, target.config)


def cut_head(head: Any, token_ids: torch.Tensor, has_static_addresses: bool = False) -> LogitsFunction:
    """
    Returns the function from features `(..., H)` to a head's logits of some tokens, `(..., K)`.

    A plain linear head is cut to the rows of these tokens: a copy of the weights, which is kept while they stay the
    same. Of any other head (quantized, offloaded, with an adapter or a hook) the logits are cut, which saves nothing.
    `has_static_addresses`: captured graphs read the cut head.
    """
    if not is_plain_linear(head):
        read = _in_its_dtype(head)
        return lambda features: _select_last(read(features), token_ids)
    whole = [parameter.detach() for parameter in (head.weight, head.bias) if parameter is not None]
    rows = token_ids.to(head.weight.device)

    def cut() -> list[torch.Tensor]:
        return [parameter.index_select(0, rows) for parameter in whole]

    weight, *biases = kept("cut head", (head, head), whole, (token_ids,), cut, has_static_addresses)
    bias = biases[0] if biases else None
    return _by_rows(lambda features: nn.functional.linear(features.to(weight.dtype), weight, bias))


def head_for_drafting(
    target: PreTrainedModel,
    drafter: GumihoModel,
    draft_vocabulary: Sequence[int] | None,
    device: torch.device,
    dtype: torch.dtype,
    has_static_addresses: bool = False,
) -> tuple[LogitsFunction, torch.Tensor | None]:
    """
    Returns the function from a drafter's features `(..., H)`, on any device, to the logits of the tokens that may be
    drafted, and the ids of these, `(K,)`; `None` where they are all. The target's output head reads states of this
    device and dtype. A drafter with an output head of its own needs no other.

    Raises:
        ValueError: The draft vocabulary has tokens that the drafter's own output head does not score.
    """
    if drafter.config.is_eagle3:
        return _own_head(drafter, draft_vocabulary, has_static_addresses)
    token_ids = None
    if draft_vocabulary is not None:
        module = target.get_output_embeddings()
        ids = list(draft_vocabulary)
        (token_ids,) = kept(
            "draft vocabulary", (module, module), (), (ids, device), lambda: [torch.tensor(ids, device=device)]
        )
    head = output_head(target, token_ids, has_static_addresses)
    return lambda features: head(features.to(device=device, dtype=dtype)), token_ids


def _own_head(
    drafter: GumihoModel, draft_vocabulary: Sequence[int] | None, has_static_addresses: bool
) -> tuple[LogitsFunction, torch.Tensor | None]:
    """Does the same with the drafter's own output head, cut to the rows of the draft vocabulary."""
    head, own = drafter.lm_head, drafter.own_tokens()
    if draft_vocabulary is None:
        return drafter.score, own
    ids, device = list(draft_vocabulary), head.weight.device

    def find_rows() -> list[torch.Tensor]:
        token_ids = rows = torch.tensor(ids, device=device)
        if own is not None:
            row_of = token_ids.new_full((drafter.config.get_text_config().vocab_size,), -1)
            row_of[own] = torch.arange(len(own), device=device)
            rows = row_of[token_ids]
            if unscored := token_ids[rows < 0].tolist():
                raise UserValueError(
                    f"`draft_vocabulary` has {len(unscored)} tokens that the drafter's own output head does not "
                    f"score, such as {unscored[0]}. It scores {len(own)} tokens (`d2t`). Leave the others out."
                )
        return [token_ids, rows]

    mapped = () if own is None else (drafter.d2t,)
    token_ids, rows = kept("draft vocabulary", (head, head), mapped, (ids, device), find_rows)
    cut = cut_head(head, rows, has_static_addresses)
    return lambda features: drafter.score(features, cut), token_ids


def scaled_head(head: LogitsFunction, target_config: PreTrainedConfig) -> LogitsFunction:
    """Returns `head` followed by the scaling and capping of logits that the target's config asks for."""
    config = target_config.get_text_config(decoder=True)
    scale = getattr(config, "logit_scale", None) or 1
    for name in ("logits_scaling", "logits_mup_width_multiplier"):
        scale = scale / (getattr(config, name, None) or 1)
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "output_logit_soft_cap", None)

    def logits_of(features: torch.Tensor) -> torch.Tensor:
        logits = head(features)
        if scale != 1:
            logits = logits * scale
        return torch.tanh(logits / cap) * cap if cap else logits

    return logits_of


def _by_rows(head: LogitsFunction) -> LogitsFunction:
    """
    Returns `head`, run on features that are flattened to rows `(n, H)`. The parallel heads' features are strided;
    PyTorch would multiply them batch by batch, and copy them for it.
    """

    def logits_of(features: torch.Tensor) -> torch.Tensor:
        logits = head(features.reshape(-1, features.shape[-1]))
        return logits.view(*features.shape[:-1], logits.shape[-1])

    return logits_of


def _in_its_dtype(head: Any) -> LogitsFunction:
    """
    Returns `head`, run on features in the dtype of its weight. A target may hand out states in float32, or keep its
    head in float32, and converts in its `forward`. The dtype of eight bits and less is not the one to read.
    """
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.element_size() == 1:
        return head  # type: ignore[no-any-return]
    return lambda features: head(features.to(head.weight.dtype))


def is_plain_linear(head: nn.Module) -> bool:
    """Whether the head multiplies with its weight, adds its bias, and does nothing else."""
    return (
        type(head) is nn.Linear
        and type(head.weight) is nn.Parameter
        and head.weight.is_floating_point()
        and runs_as_defined(head)
    )


def _select_last(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return logits.index_select(-1, token_ids.to(logits.device))
