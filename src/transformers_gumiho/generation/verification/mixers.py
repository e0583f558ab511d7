"""
Mixers of transformers in passes over draft trees. The functions that they call for a convolution and a recurrence are
replaced, once, by functions that do the same, except for what [`TreeStates`] hands out in such a pass. For these the
algebra of `tree/recurrence.py` runs, also where a kernel (`fla`, `causal-conv1d`, `mamba-ssm`) is installed.
"""

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from transformers.activations import ACT2FN

from ...internals import (
    CONVOLUTION,
    DELTA_RULES,
    READS_OF_STATES,
    SCAN,
    modules_of,
)
from ..tree.recurrence import NodeTerms, convolve, run_delta_rule, run_scan, widened
from .ownership import package_of
from .tree_states import NodeInputs, RootState


# Attribute of a function that stands in for another one here, with what else does so.
_REPLACED = "_replaced_for_trees"
# Tokens of a chunk of the delta rules, whose functions have it as a default.
_DELTA_CHUNK = 64


def holds_tree(decoder: nn.Module) -> bool:
    """
    Whether a decoder's states hold a draft tree: its layers compute them by functions whose algebra is known. Replaces
    these functions.
    """
    kinds = set(map(type, modules_of(decoder)))
    mixers = [kind for kind in kinds if not READS_OF_STATES.isdisjoint(names_in_code(kind))]
    return bool(mixers) and all(map(_is_prepared, mixers))


def chunk_length(decoder: nn.Module) -> int:
    """Returns to how many tokens a decoder's layers pad a pass over two or more, where no kernel is installed."""
    lengths = [0]
    for module in modules_of(decoder):
        kind: type = type(module)
        names = names_in_code(kind)
        lengths.append(_DELTA_CHUNK if not names.keys().isdisjoint(DELTA_RULES) else 0)
        lengths.append(getattr(module, "chunk_size", 0) if SCAN in names else 0)
    return max(lengths)


@functools.cache
def names_in_code(kind: type) -> dict[str, dict[str, Any]]:
    """Returns the names of functions and attributes in the code of a class, each with the globals of that code."""
    functions = [
        value for base in reversed(kind.__mro__) for value in vars(base).values() if inspect.isfunction(value)
    ]
    found: dict[str, dict[str, Any]] = {}
    for plain in map(inspect.unwrap, functions):
        codes = [plain.__code__]
        for code in codes:  # grows while it is read, by functions within functions
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            found |= dict.fromkeys(code.co_names, plain.__globals__)
    return found


def _is_prepared(kind: type) -> bool:
    """Replaces the functions that a class of mixers calls. Returns whether these write all of its states."""
    names = names_in_code(kind)
    prepared = {name for name in _STAND_INS.keys() & names if _is_replaced(names[name], name)}
    has_convolution = CONVOLUTION in prepared or "update_conv_state" not in names
    has_recurrence = not prepared.isdisjoint((*DELTA_RULES, SCAN)) or "update_recurrent_state" not in names
    return has_convolution and has_recurrence


def _is_replaced(file: dict[str, Any], name: str) -> bool:
    """Replaces a function where the code of a class looks it up; not one that a user has put there."""
    plain: Any = file.get(name)
    if getattr(plain, _REPLACED, None) is _STAND_INS:
        return True
    # Another copy of this package may have replaced it, too.
    if not hasattr(plain, _REPLACED) and package_of(plain) != "transformers":
        return False
    place, stand_in = _STAND_INS[name]

    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        argument = args[0] if place is None and args else kwargs.get(place or "hidden_states")
        return (stand_in if isinstance(argument, (NodeInputs, RootState)) else plain)(*args, **kwargs)

    setattr(function, _REPLACED, _STAND_INS)
    file[name] = function
    return True


def _convolution(
    hidden_states: NodeInputs,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """A causal convolution with `weight` `(C, width)` of all nodes. Returns `(B, C, n)`."""
    output = convolve(hidden_states.windows(weight.shape[1]), weight, bias)
    return (output if activation is None else ACT2FN[activation](output)).to(hidden_states.inputs.dtype)


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: RootState,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, NodeTerms]:
    """A gated delta rule over `(B, n, heads, width)`, with decays `g` `(B, n, heads)`, or those of each channel."""
    dtype, num_groups = query.dtype, value.shape[2] // key.shape[2]
    decay = g if g.ndim == 4 else g[..., None]
    with torch.autocast(query.device.type, enabled=False):
        query, key, value, decay, beta = (
            widened(own).transpose(1, 2) for own in (query, key, value, decay, beta[..., None])
        )
        if num_groups > 1:
            query, key = (own.repeat_interleave(num_groups, dim=1) for own in (query, key))
        if use_qk_l2norm_in_kernel:
            query, key = (own * torch.rsqrt(own.square().sum(dim=-1, keepdim=True) + 1e-6) for own in (query, key))
        query = query * query.shape[-1] ** -0.5
        output, terms = run_delta_rule(query, key, value, decay, beta, initial_state.state, initial_state.ancestors)
    return output.transpose(1, 2).to(dtype), terms


def _scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: RootState | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, NodeTerms]:
    """
    The scan of Mamba-2 over `(B, n, heads, width)`, with time steps `dt` `(B, n, heads)`, and `B` and `C` `(B, n,
    groups, width)`. Time steps are not bounded, as in a step of plain decoding.
    """
    assert initial_states is not None
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = softplus(dt) if dt_softplus else dt
    num_groups = hidden_states.shape[2] // B.shape[2]
    with torch.autocast(dt.device.type, enabled=False):
        inputs, steps, write, read = (widened(own).transpose(1, 2) for own in (hidden_states, dt[..., None], B, C))
        write, read = (own.repeat_interleave(num_groups, dim=1) for own in (write, read))
        decay = steps * A[:, None, None]
        output, terms = run_scan(inputs * steps, decay, write, read, initial_states.state, initial_states.ancestors)
        output = output if D is None else output + inputs * D[:, None, None]
    return output.transpose(1, 2).contiguous(), terms


# By name of the function: its argument that comes from the cache (`None`: the first), and what stands for it.
_STAND_INS: dict[str, tuple[str | None, Callable[..., Any]]] = {
    CONVOLUTION: (None, _convolution),
    **dict.fromkeys(DELTA_RULES, ("initial_state", _delta_rule)),
    SCAN: ("initial_states", _scan),
}
