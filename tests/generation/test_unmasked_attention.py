"""Targets loaded with attention that takes no tree mask: trees are verified by masked attention, all else stays."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chains import make_chain_drafter, make_chain_target
from targets import equals_plain, make_drafter, make_prompts, make_target
from torch import nn
from transformers import FalconConfig, FalconForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from transformers_gumiho.generation.verification import attention, attention_kind
from transformers_gumiho.internals import set_attention_implementation


class FlashAttention:
    """
    Stands for flash attention on a CPU: it knows causal masks, windows, padding, soft caps and sinks, and no tree.
    """

    def __init__(self) -> None:
        self.passes: Counter[int] = Counter()  # by the number of queries

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        assert attention_mask is None or attention_mask.ndim == 2, "flash attention takes no tree mask"
        self.passes[query.shape[2]] += 1
        key, value = (repeat_kv(states, query.shape[1] // states.shape[1]) for states in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None] - torch.arange(key.shape[2])
        hidden = behind < 0 if sliding_window is None else (behind < 0) | (behind >= sliding_window)
        hidden = hidden[None, None]
        if attention_mask is not None:
            hidden = hidden | (attention_mask[:, None, None, :] == 0)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        if s_aux is not None:
            sinks = s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, sinks), dim=3)
        weights = scores.softmax(dim=-1)[..., : key.shape[2]]
        return (weights @ value).transpose(1, 2), None


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], FlashAttention]:
    """Registers the stand-in by a name, until the test ends."""

    def put(name: str) -> FlashAttention:
        flash = FlashAttention()
        monkeypatch.setitem(AttentionInterface._global_mapping, name, flash)  # noqa: SLF001
        for module in (attention, attention_kind):
            monkeypatch.setattr(module, "UNMASKED_ATTENTION", (flash,))  # as one of transformers' own
        # The masks that the prompt's pass is given: padding alone.
        masks = AttentionMaskInterface._global_mapping  # noqa: SLF001
        monkeypatch.setitem(masks, name, masks["flash_attention_2"])
        return flash

    return put


def load_with(name: str, target: PreTrainedModel) -> PreTrainedModel:
    """Makes a target attend as if it had been loaded with `attn_implementation=name`, which needs a GPU."""
    set_attention_implementation(target.config, name)
    return target


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention", "org/some-kernel"])
@pytest.mark.parametrize("lengths", [[9], [9, 4]])
def test_trees_are_verified_by_masked_attention(
    name: str, lengths: list[int], register: Callable[[str], FlashAttention]
) -> None:
    flash, target = register(name), load_with(name, make_target())
    drafter, prompts = make_drafter(make_target(), num_assistant_tokens=20), make_prompts(lengths)
    for do_sample in (False, True):
        flash.passes.clear()
        output = equals_plain(target, drafter, **prompts, max_new_tokens=24, do_sample=do_sample)
        assert max(output.accepted_lengths[0]) > 1
        # Plain decoding runs the prompt and 23 tokens, and drafted decoding the prompt alone.
        num_layers = target.config.num_hidden_layers
        assert flash.passes == {9: 2 * num_layers, 1: 23 * num_layers}


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral", "qwen2_mixed"])
@pytest.mark.parametrize(
    "static", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=["", "static"]
)
def test_options_of_layers_are_honored(
    family: str, static: dict[str, Any], register: Callable[[str], FlashAttention]
) -> None:
    """Soft caps, sinks and windows: texts are those of the model's own eager attention."""
    eager, prompts = make_target(family, "eager"), make_prompts([9])
    expected = eager.generate(**prompts, max_new_tokens=24, do_sample=False)
    register("flash_attention_2")
    target = load_with("flash_attention_2", make_target(family))
    drafter = make_drafter(eager, num_assistant_tokens=20)
    assert torch.equal(target.generate(**prompts, max_new_tokens=24, do_sample=False), expected)
    output = target.generate(
        **prompts, max_new_tokens=24, do_sample=False, assistant_model=drafter, return_dict_in_generate=True, **static
    )
    assert torch.equal(output.sequences, expected)
    assert max(output.accepted_lengths[0]) > 1


def test_an_option_decides_and_not_the_family(register: Callable[[str], FlashAttention]) -> None:
    """Of the functions of one file, that which knows the option is taken: Gemma's eager function knows soft caps."""
    register("flash_attention_2")
    target = load_with("flash_attention_2", make_target("gemma3"))
    for layer in target.model.layers:
        layer.self_attn.attn_logit_softcapping = 2.0
    drafter = make_drafter(target, num_assistant_tokens=20)
    equals_plain(target, drafter, lengths=[9], max_new_tokens=24)


def test_chains_stay_with_the_own_kernel(register: Callable[[str], FlashAttention]) -> None:
    flash, target = (
        register("flash_attention_2"),
        load_with("flash_attention_2", make_chain_target("llama4_unchunked")),
    )
    equals_plain(target, make_chain_drafter(target), lengths=[9], max_new_tokens=24)
    assert {num_queries for num_queries in flash.passes if num_queries not in (1, 9)}, "chains, too"


def test_refusals(register: Callable[[str], FlashAttention], monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, prompts = make_drafter(make_target(), num_assistant_tokens=20), make_prompts([5])
    flash = register("flash_attention_2")

    def refuses(target: PreTrainedModel, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load_with("flash_attention_2", target).generate(**prompts, assistant_model=drafter)
        assert not flash.passes, "refused before the prompt"

    config = FalconConfig(vocab_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=False)
    refuses(FalconForCausalLM(config), "'flash_attention_2': its code does not look up attention functions")
    with monkeypatch.context() as patch:
        patch.delattr("transformers.models.llama.modeling_llama.eager_attention_forward")
        refuses(make_target(), "has no `eager_attention_forward` to fall back to. Load it with")
    with monkeypatch.context() as patch:
        own = AttentionInterface()
        own["flash_attention_2"] = lambda *args, **kwargs: None
        patch.setattr("transformers.models.llama.modeling_llama.ALL_ATTENTION_FUNCTIONS", own)
        refuses(make_target(), "another program has put a function of its own in its place")
