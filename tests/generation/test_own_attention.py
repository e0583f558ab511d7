"""Targets with attention functions of the user's: passes over drafts compute these, or the call is refused."""

import functools
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from chains import make_chain_target
from peft import LoraConfig, inject_adapter_in_model
from targets import equals_plain, make_drafter, make_prompts, make_target
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import eager_mask, flash_attention_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama
from transformers.utils.deprecation import deprecate_kwarg

from transformers_gumiho import attach, attached
from transformers_gumiho.generation.verification.ownership import foreign_code
from transformers_gumiho.generation.verification.traits import TargetTraits
from transformers_gumiho.generation.verification.trial import check_multi_token_decode
from transformers_gumiho.internals import CACHE_NAME, set_attention_implementation


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


def causal_by_slots(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Ignores the mask that it asks for."""
    return clipped(module, query, key, value, None, **kwargs)


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


def check_text(target: PreTrainedModel) -> None:
    """Asserts that drafted texts are the plain ones, and that they come of chains."""
    accepted: list[int] = []
    drafter = make_drafter(make_target(num_layers=3))
    for prompts, sampling in ((make_prompts([7]), {}), (make_prompts([6, 3]), {}), (make_prompts([6, 3]), SAMPLED)):
        output = equals_plain(target, drafter, **prompts, **sampling, max_new_tokens=24)
        accepted += [length for lengths in output.accepted_lengths for length in lengths]
        assert max(output.tree_sizes) == drafter.config.max_draft_depth
    assert max(accepted) > 1


REGISTERED = {
    "temperature": ("sharper", sharper, sdpa_mask),
    "masks to add": ("clipped", clipped, eager_mask),
    "in place of sdpa": ("sdpa", clipped, None),
    "in place of eager": ("eager", clipped, None),
    "a mask function of its own": ("sharper", sharper, wrapped_mask),
    "padding alone": ("clipped", clipped, flash_attention_mask),
    "no mask function": ("bare", clipped, None),
    "ignores masks": ("causal", causal_by_slots, sdpa_mask),
    "another mask function for sdpa": ("sdpa", sdpa_attention_forward, wrapped_mask),
}


@pytest.mark.parametrize(
    ("given", "on_instance"),
    [*((given, False) for given in REGISTERED.values()), (REGISTERED["in place of sdpa"], True)],
    ids=[*REGISTERED, "in place of sdpa, of an instance"],
)
def test_a_registered_function_verifies_chains(
    given: tuple[str, Function, Any], on_instance: bool, register: Callable[..., None]
) -> None:
    name, function, mask = given
    register(name, function, mask, on_instance)
    check_text(make_target(attn_implementation=name, num_layers=3))


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


def windowed(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a mask function with a window that no config names."""

    def create(config: Any, inputs_embeds: Any, **kwargs: Any) -> Any:
        mask = plain(config, inputs_embeds, **kwargs, or_mask_function=lambda *args: args[0] < 0)
        return mask.logical_and(torch.ones_like(mask).triu(mask.shape[3] - mask.shape[2] - 3))

    return create


def halving(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of a cache that changes what it holds."""

    def update(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return plain(self, keys, values / 2, *args, **kwargs)

    return update


def handing_on(plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: plain(*args, **kwargs)


def mixing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `forward` of layers that see no mask, in which a token changes by those before it in its pass."""
    return lambda self, states: plain(self, states + 0.1 * (states.cumsum(dim=1) - states))


# What a patch replaces, with what, and whether the passes over chains that it leads to are right.
PATCHES: dict[str, tuple[Any, str, Callable[..., Any], bool]] = {
    "attention": (modeling_llama.LlamaAttention, "forward", lambda _: layers_with(clipped), True),
    "attention in a window": (modeling_llama.LlamaAttention, "forward", lambda _: layers_with(causal_by_slots), True),
    "eager function": (modeling_llama, "eager_attention_forward", lambda _: clipped, True),
    "mask function": (modeling_llama, "create_causal_mask", windowed, True),
    "rotary embedding": (modeling_llama, "apply_rotary_pos_emb", handing_on, True),
    "layers without masks": (modeling_llama.LlamaMLP, "forward", mixing, False),
    "PyTorch's attention": (functional, "scaled_dot_product_attention", handing_on, True),
    "cache": (DynamicCache, "update", halving, True),
    "layers of the cache": (DynamicLayer, "update", halving, True),
}


class Caller:
    def __init__(self, function: Function):
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


DECORATORS: dict[str, Callable[[Any, Any], Any]] = {
    "bare": lambda plain, own: own,
    "wraps": lambda plain, own: functools.wraps(plain)(own),
    "no_grad": lambda plain, own: torch.no_grad()(functools.wraps(plain)(own)),
    "partial": lambda plain, own: functools.partial(own),
    "a decorator of transformers": lambda plain, own: deprecate_kwarg("old", "99.0", new_name="new")(own),
    "an object": lambda plain, own: functools.update_wrapper(Caller(own), plain),
}


@pytest.mark.parametrize("decorator", DECORATORS)
@pytest.mark.parametrize("patch", PATCHES)
def test_patched_code_is_found_however_it_is_decorated(
    patch: str, decorator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`functools.wraps` copies names, and decorators of known packages hide what they wrap."""
    owner, name, make, _ = PATCHES[patch]
    target = make_target(attn_implementation="eager" if patch == "eager function" else "sdpa", num_layers=1)
    assert not foreign_code(target)
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, DECORATORS[decorator](plain, make(plain)))
    traits = TargetTraits.of(target)
    assert traits.is_chain
    assert any("test_own_attention" in function.name for function in traits.foreign)


@pytest.mark.parametrize("patch", PATCHES)
def test_patched_code_verifies_chains_or_is_refused(patch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, make, is_right = PATCHES[patch]
    plain = getattr(owner, name)
    monkeypatch.setattr(owner, name, functools.wraps(plain)(make(plain)))
    target = make_target(attn_implementation="eager" if patch == "eager function" else "sdpa", num_layers=3)
    if is_right:
        check_text(target)
        return
    drafter, prompts = make_drafter(target), make_prompts([6])
    with pytest.raises(ValueError, match="cannot verify drafts: multi-token passes differ"):
        target.generate(**prompts, assistant_model=drafter)
    with pytest.raises(ValueError, match="multi-token passes differ"):
        attach(target, drafter)


@pytest.mark.parametrize("way", ["a module", "a subclass", "a subclass of the target"])
def test_code_of_one_target(way: str) -> None:
    target = make_target(num_layers=3)
    for layer in target.model.layers:
        if way == "a module":
            layer.self_attn.forward = types.MethodType(layers_with(clipped), layer.self_attn)
        elif way == "a subclass":
            layer.self_attn.__class__ = type("Own", (type(layer.self_attn),), {"forward": layers_with(clipped)})
    if way == "a subclass of the target":
        forward = type(target).forward
        own = {"forward": lambda self, *args, **kwargs: forward(self, *args, **kwargs)}
        target.__class__ = type("Own", (type(target),), own)
    assert not TargetTraits.of(make_target(num_layers=3)).foreign
    check_text(target)


def test_methods_that_a_forward_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read as it is; those that no pass runs are not."""
    target = make_target("gemma3")
    target.__class__ = type("Own", (type(target),), {"describe": lambda self: "mine"})
    assert not foreign_code(target)
    kind, name = modeling_gemma3.Gemma3RMSNorm, "_norm"
    plain = getattr(kind, name)
    monkeypatch.setattr(kind, name, functools.wraps(plain)(handing_on(plain)))
    assert TargetTraits.of(target).is_chain


def test_what_known_packages_put_around_a_target_is_its_own() -> None:
    target = make_target(num_layers=3)
    add_hook_to_module(target.model, AlignDevicesHook("cpu"))
    target.model.layers[0].forward = torch.no_grad()(target.model.layers[0].forward)
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"], init_lora_weights=False), target)
    assert not foreign_code(target)
    assert not TargetTraits.of(target).is_chain


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


def test_layers_of_their_own(register: Callable[..., None]) -> None:
    """One layer has another function than the others."""
    register("clipped", clipped, sdpa_mask)
    target = make_target(num_layers=3)
    attention = target.model.layers[1].self_attn
    attention.config = type(target.config).from_dict(target.config.to_dict())
    set_attention_implementation(attention.config, "clipped")
    check_text(target)


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
        set_attention_implementation(target.config, name)
        plain = target.generate(**prompts, max_new_tokens=9, do_sample=False, assistant_model=None)
        with pytest.raises(ValueError, match=f"{name}': another program has put a function of its own in its place"):
            target.generate(**prompts, assistant_model=drafter)
        assert torch.equal(target.generate(**prompts, max_new_tokens=9, do_sample=False), plain)
    assert all(mask is None or mask.ndim == 2 for mask in masks)


def test_a_function_that_is_replaced_is_tried_again(register: Callable[..., None]) -> None:
    """What was found out about one function says nothing about the next of that name."""
    target = make_target(attn_implementation="sdpa", num_layers=3)
    for function in (clipped, one_by_one, clipped):
        register("mine", function, sdpa_mask)
        target.set_attn_implementation("mine")
        with pytest.raises(ValueError, match="differ") if function is one_by_one else nullcontext():
            check_multi_token_decode(target, TargetTraits.of(target), None)


def test_a_target_in_train_mode_is_tried_in_eval_mode() -> None:
    """Dropout neither decides whether it can draft, nor do its draws change what is drawn later."""
    target = make_chain_target("bloom")
    for block in target.transformer.h:
        block.self_attention.hidden_dropout = block.mlp.hidden_dropout = 0.5
    target.train()
    state = torch.random.get_rng_state()
    check_multi_token_decode(target, TargetTraits.of(target), None)
    assert all(module.training for module in target.modules())
    assert torch.equal(torch.random.get_rng_state(), state)
