"""Targets with attention functions of the user's: passes over drafts compute these, or the call is refused."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import make_chain_target
from targets import equals_plain, make_drafter, make_prompts, make_target
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import eager_mask, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from transformers_gumiho import attached
from transformers_gumiho.generation.verification.continuation import check_multi_token_decode
from transformers_gumiho.generation.verification.traits import TargetTraits
from transformers_gumiho.internals import CACHE_NAME, adopt_attention_implementation


Function = Callable[..., tuple[torch.Tensor, None]]
SAMPLED = {"do_sample": True}


def sharper(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Attention at another temperature."""
    return sdpa_attention_forward(module, query * 2, *args, **kwargs)


def clipped(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> Any:
    """Clipped scores. Reads boolean masks, masks to add, and as flash attention masks of padding."""
    key, value = (repeat_kv(states, query.shape[1] // states.shape[1]) for states in (key, value))
    scores = (query @ key.transpose(2, 3) * scaling).clamp(-0.5, 0.5)
    if attention_mask is None or attention_mask.ndim == 2:
        behind = torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None] - torch.arange(key.shape[2])
        hidden = (behind < 0)[None, None]
        if attention_mask is not None:
            hidden = hidden | ~attention_mask[:, None, None].bool()
        scores = scores.masked_fill(hidden, -1e30)
    elif attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, -1e30)
    else:
        scores = scores + attention_mask
    return (scores.softmax(dim=-1) @ value).transpose(1, 2), None


def boolean_alone(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """Takes no other masks than those that it asks for."""
    assert mask is None or mask.dtype == torch.bool
    return clipped(module, query, key, value, mask, **kwargs)


def causal_by_slots(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Ignores the mask that it asks for."""
    return clipped(module, query, key, value, None, **kwargs)


def distant(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: Any, attention_mask: Any, **kwargs: Any
) -> Any:
    """Adds a bias of the distance in cache slots, which is not that of positions in a tree."""
    slots = torch.arange(key.shape[2])
    behind = slots[key.shape[2] - query.shape[2] :, None] - slots
    bias = -0.3 * behind.clamp(min=0).to(query.dtype)[None, None]
    if attention_mask is None:
        attention_mask = behind >= 0
    elif attention_mask.is_floating_point():
        attention_mask = attention_mask == 0
    mask = bias.masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def one_by_one(module: nn.Module, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes prompts and single tokens alone."""
    scale = 1.0 if query.shape[2] in (1, key.shape[2]) else 3.0
    return sdpa_attention_forward(module, query * scale, key, *args, **kwargs)


def wrapped_mask(*args: Any, **kwargs: Any) -> Any:
    return sdpa_mask(*args, **kwargs)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Registers attention functions, until the test ends."""

    def put(name: str, function: Function, mask: Any = None, on_instance: bool = False) -> None:
        mapping = ALL_ATTENTION_FUNCTIONS._local_mapping if on_instance else AttentionInterface._global_mapping  # noqa: SLF001
        monkeypatch.setitem(mapping, name, function)
        if mask is not None:
            monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, mask)  # noqa: SLF001

    return put


def check_text(target: PreTrainedModel, is_chain: bool, one_row: bool = False) -> None:
    """Asserts that drafted texts are the plain ones, and that they come of trees, or of chains."""
    assert TargetTraits.of(target).is_chain == is_chain
    accepted: list[int] = []
    drafter = make_drafter(make_target(num_layers=3))
    limit = drafter.config.max_draft_depth if is_chain else 63
    for prompts, sampling in ((make_prompts([7]), {}), (make_prompts([6, 3]), {}), (make_prompts([6, 3]), SAMPLED)):
        if one_row and len(prompts["input_ids"]) > 1:
            continue
        output = equals_plain(target, drafter, **prompts, **sampling, max_new_tokens=24)
        accepted += [length for lengths in output.accepted_lengths for length in lengths]
        assert max(output.tree_sizes) == limit
    assert max(accepted) > 1


TREES = {
    "temperature": ("sharper", sharper, sdpa_mask),
    "clipping": ("clipped", clipped, sdpa_mask),
    "masks to add": ("clipped", clipped, eager_mask),
    "in place of sdpa": ("sdpa", boolean_alone, None),
    "in place of eager": ("eager", clipped, None),
}
CHAINS = {
    "a mask function of its own": ("sharper", sharper, wrapped_mask),
    "padding alone": ("clipped", clipped, flash_attention_mask),
    "ignores masks": ("causal", causal_by_slots, sdpa_mask),
    "distances in slots": ("distant", distant, sdpa_mask),
    "another mask function for sdpa": ("sdpa", sdpa_attention_forward, wrapped_mask),
}


@pytest.mark.parametrize(
    ("given", "on_instance"),
    [*((given, False) for given in TREES.values()), (TREES["clipping"], True), (TREES["in place of sdpa"], True)],
    ids=[*TREES, "of an instance", "in place of sdpa, of an instance"],
)
def test_a_function_that_takes_dense_masks_computes_trees(
    given: tuple[str, Function, Any], on_instance: bool, register: Callable[..., None]
) -> None:
    name, function, mask = given
    register(name, function, mask, on_instance)
    check_text(make_target(attn_implementation=name, num_layers=3), is_chain=False)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "qwen2_mixed"])
def test_windows_are_in_its_masks(family: str, register: Callable[..., None]) -> None:
    register("clipped", clipped, sdpa_mask)
    target, drafter = make_target(family, "clipped", num_layers=3), make_drafter(make_target(family, num_layers=3))
    static = {"cache_implementation": "static", "disable_compile": True}
    for lengths, drafted in (([9], {}), ([9, 4], {}), ([9, 4], static)):
        output = equals_plain(target, drafter, lengths=lengths, drafted=drafted)
        assert max(output.tree_sizes) == 63


@pytest.mark.parametrize("function", [clipped, sharper])
def test_without_a_mask_function_it_sees_padding(function: Function, register: Callable[..., None]) -> None:
    """Plain decoding gives it no masks at all, and so it attends to the padding, too."""
    register("bare", function)
    check_text(make_target(attn_implementation="bare", num_layers=3), is_chain=False)


@pytest.mark.parametrize("given", CHAINS.values(), ids=[*CHAINS])
def test_other_functions_compute_chains(given: tuple[str, Function, Any], register: Callable[..., None]) -> None:
    name, function, mask = given
    register(name, function, mask)
    # With padding, a function that ignores masks sees other tokens in longer passes, and is refused.
    check_text(make_target(attn_implementation=name, num_layers=3), is_chain=True, one_row=name == "distant")


def layers_with(function: Function) -> Callable[..., Any]:
    """Returns the `forward` of a layer's attention that computes this function."""

    def forward(
        self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        shape = hidden_states.shape[:-1]
        states = [project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj)]
        query, key, value = (projected.view(*shape, -1, self.head_dim).transpose(1, 2) for projected in states)
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        if kwargs.get(CACHE_NAME) is not None:
            key, value = kwargs[CACHE_NAME].update(key, value, self.layer_idx)
        output, _ = function(self, query, key, value, attention_mask, scaling=self.scaling)
        return self.o_proj(output.reshape(*shape, -1)), None

    return forward


@pytest.mark.parametrize("way", ["modules", "subclass", "class", "eager function"])
@pytest.mark.parametrize(
    ("function", "is_chain"),
    [(clipped, False), (causal_by_slots, True), (distant, True)],
    ids=["clipping", "ignores masks", "distances"],
)
def test_code_that_is_not_registered_is_tried(
    function: Function, is_chain: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patches, and layers of other packages, look like transformers' own attention."""
    target = make_target(attn_implementation="eager" if way == "eager function" else "sdpa", num_layers=3)
    for layer in target.model.layers:
        if way == "modules":
            layer.self_attn.forward = types.MethodType(layers_with(function), layer.self_attn)
        elif way == "subclass":
            layer.self_attn.__class__ = type("Own", (type(layer.self_attn),), {"forward": layers_with(function)})
    if way == "class":
        monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", layers_with(function))
    elif way == "eager function":
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", function)
    check_text(target, is_chain, one_row=function is distant)


def test_a_mask_function_that_was_replaced_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that no config names: passes over trees would see what is before it."""
    plain = modeling_llama.create_causal_mask

    def windowed(config: Any, inputs_embeds: Any, **kwargs: Any) -> Any:
        mask = plain(config, inputs_embeds, **kwargs, or_mask_function=lambda *args: args[0] < 0)
        return mask.logical_and(torch.ones_like(mask).triu(mask.shape[3] - mask.shape[2] - 3))

    monkeypatch.setattr(modeling_llama, "create_causal_mask", windowed)
    check_text(make_target(num_layers=3), is_chain=True)


@pytest.mark.parametrize("mask", [sdpa_mask, None])
@pytest.mark.parametrize("size", [14, 100])
def test_windows_that_begin_in_a_longer_text_are_noticed(size: int, mask: Any, register: Callable[..., None]) -> None:
    """They are cut by cache slots, among which are those of other branches and of later tokens."""

    def windowed(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if attention_mask is not None:
            attention_mask = attention_mask[..., -size:]
        return sdpa_attention_forward(module, query, key[:, :, -size:], value[:, :, -size:], attention_mask, **kwargs)

    register("windowed", windowed, mask)
    target, drafter = (
        make_target(attn_implementation="windowed", num_layers=3),
        make_drafter(make_target(num_layers=3)),
    )
    with pytest.raises(ValueError, match="with the attention 'windowed': multi-token passes differ"):
        target.generate(**make_prompts([6]), assistant_model=drafter)


@pytest.mark.parametrize("num_tokens", [20, 60])
def test_layers_that_treat_large_passes_in_another_way_verify_chains(num_tokens: int) -> None:
    target = make_target(num_layers=3)
    plain = target.model.layers[1].forward
    target.model.layers[1].forward = lambda states, **kwargs: plain(
        states * (1 + 0.1 * (num_tokens < states.shape[1] < 70)), **kwargs
    )
    check_text(target, is_chain=True)


def test_layers_of_their_own(register: Callable[..., None]) -> None:
    """One layer has another function than the others."""
    register("clipped", clipped, sdpa_mask)
    target = make_target(num_layers=3)
    attention = target.model.layers[1].self_attn
    attention.config = type(target.config).from_dict(target.config.to_dict())
    adopt_attention_implementation(attention.config, LlamaConfig(attn_implementation="clipped"))
    check_text(target, is_chain=True)


def test_what_no_pass_over_drafts_computes_is_refused_by_name(
    register: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    register("single", one_by_one, wrapped_mask)
    target, prompts = make_target(attn_implementation="single", num_layers=3), make_prompts([6])
    drafter = make_drafter(make_target(num_layers=3))
    with pytest.raises(ValueError, match="with the attention 'single': multi-token passes differ"):
        target.generate(**prompts, assistant_model=drafter)
    register("bare", sharper)
    windows = make_target("mistral", "bare", num_layers=3)
    drafter_of_windows = make_drafter(make_target("mistral", num_layers=3))
    with pytest.raises(ValueError, match="with the attention 'bare': it has no mask function"):
        windows.generate(**prompts, assistant_model=drafter_of_windows)
    plain = windows.generate(**prompts, max_new_tokens=9, do_sample=False)
    with (
        pytest.raises(ValueError, match="'bare'"),
        attached(windows, make_drafter(make_target("mistral", num_layers=3))),
    ):
        pass
    target.set_attn_implementation("sdpa")
    with attached(target, drafter):
        target.set_attn_implementation("single")
        plain = target.generate(**prompts, max_new_tokens=9, do_sample=False, assistant_model=None)
        assert torch.equal(target.generate(**prompts, max_new_tokens=9, do_sample=False), plain)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
@pytest.mark.parametrize("on_instance", [False, True], ids=["class", "instance"])
def test_another_program_that_shadows_a_kernel(name: str, on_instance: bool, register: Callable[..., None]) -> None:
    """What takes no dense mask gets none, whoever wraps it."""
    masks: list[Any] = []

    def theirs(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        masks.append(mask)
        return clipped(module, query, key, value, mask, **kwargs)

    target, drafter, prompts = make_target(num_layers=3), make_drafter(make_target(num_layers=3)), make_prompts([6, 4])
    with attached(target, drafter):
        register(name, theirs, flash_attention_mask, on_instance)
        adopt_attention_implementation(target.config, LlamaConfig(attn_implementation=name))
        plain = target.generate(**prompts, max_new_tokens=9, do_sample=False, assistant_model=None)
        with pytest.raises(ValueError, match=f"{name}': another program has put a function of its own in its place"):
            target.generate(**prompts, assistant_model=drafter)
        assert torch.equal(target.generate(**prompts, max_new_tokens=9, do_sample=False), plain)
    assert all(mask is None or mask.ndim == 2 for mask in masks)


def test_a_function_that_is_replaced_is_tried_again(register: Callable[..., None]) -> None:
    """What was found out about one function says nothing about the next of that name."""
    target = make_target(attn_implementation="sdpa", num_layers=3)
    for function, is_chain in ((clipped, False), (causal_by_slots, True), (clipped, False)):
        register("mine", function, sdpa_mask)
        target.set_attn_implementation("mine")
        assert TargetTraits.of(target).is_chain == is_chain


def test_importing_registers_nothing_and_the_first_drafted_call_does(monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = make_target(num_layers=3), make_prompts([5])
    own = AttentionInterface._global_mapping  # noqa: SLF001
    monkeypatch.setitem(own, "sdpa", sdpa_attention_forward)
    target.generate(**prompts, max_new_tokens=4)
    assert own["sdpa"] is sdpa_attention_forward
    target.generate(**prompts, max_new_tokens=4, assistant_model=make_drafter(target))
    assert own["sdpa"].__wrapped__ is sdpa_attention_forward


@pytest.mark.parametrize("way", ["trees", "chains"])
def test_a_target_in_train_mode_is_tried_in_eval_mode(way: str, register: Callable[..., None]) -> None:
    """Dropout neither decides whether it can draft, nor do its draws change what is drawn later."""
    if way == "trees":
        register("sharper", sharper, sdpa_mask)
        target = make_target(attn_implementation="sharper", num_layers=3)
        for layer in target.model.layers:
            layer.self_attn.attention_dropout = 0.5
    else:
        target = make_chain_target("bloom")
        for block in target.transformer.h:
            block.self_attention.hidden_dropout = block.mlp.hidden_dropout = 0.5
    target.train()
    state = torch.random.get_rng_state()
    traits = TargetTraits.of(target)
    assert traits.is_chain == (way == "chains")
    if traits.is_chain:
        check_multi_token_decode(target, traits, None)
    assert all(module.training for module in target.modules())
    assert torch.equal(torch.random.get_rng_state(), state)
