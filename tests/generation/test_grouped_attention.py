"""Passes over draft trees read grouped keys and values where they are; what they compute, and all others, stay."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from pretend_device import pretending
from targets import equals_plain, make_drafter, make_prompts, make_target
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from transformers_gumiho.generation.verification import attention
from transformers_gumiho.generation.verification.attention import attend_folded, gqa_without_copies
from transformers_gumiho.internals import attention_implementation


class Layer(nn.Module):
    is_causal = True

    def __init__(self, num_groups: int):
        super().__init__()
        self.num_key_value_groups = num_groups


class LargestCopy(TorchDispatchMode):
    """Finds the most elements that an operation other than attention itself writes into new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.clone.default, torch.ops.aten.repeat_interleave.self_int):
            self.num_elements = max(self.num_elements, args[0].numel())
        return func(*args, **(kwargs or {}))


def make_inputs(
    batch_size: int, num_groups: int, num_heads: int, num_queries: int, num_keys: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Returns queries, keys, values and a mask as a layer has them: keys and values are a part of larger buffers."""
    head_dim = 8
    query = torch.randn(batch_size, num_queries, num_groups * num_heads, head_dim, dtype=dtype).transpose(1, 2)
    keys, values = torch.randn(2, batch_size, num_heads, num_keys + 5, head_dim, dtype=dtype)[..., :num_keys, :]
    hidden = torch.rand(batch_size, 1, num_queries, num_keys) < 0.4
    hidden[..., -1] = False
    ragged = torch.randint(0, num_keys, (batch_size,))
    hidden |= (torch.arange(num_keys) < ragged[:, None])[:, None, None] & (torch.arange(num_keys) < num_keys - 1)
    return query, keys, values, torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_attention_in_place_is_bit_identical(num_groups: int, dtype: torch.dtype) -> None:
    with gqa_without_copies():
        attend, layer = ALL_ATTENTION_FUNCTIONS["sdpa"], Layer(num_groups)
    torch.manual_seed(0)
    for sizes in ((1, 1, 2, 9), (1, 2, 17, 130), (3, 1, 33, 77), (3, 3, 5, 600), (2, 2, 65, 66), (2, 2, 1, 50)):
        query, key, value, mask = make_inputs(sizes[0], num_groups, *sizes[1:], dtype)
        for given in (mask, mask == 0):
            expected = sdpa_attention_forward(layer, query, key, value, given, scaling=0.3)[0]
            with gqa_without_copies(), LargestCopy() as largest:
                output, weights = attend(layer, query, key, value, given, scaling=0.3, sliding_window=4)
            assert weights is None
            assert torch.equal(output, expected)
            assert output.is_contiguous()
            assert num_groups == 1 or largest.num_elements <= max(output.numel(), query.numel())


@pytest.mark.parametrize("num_groups", [1, 2, 3, 8])
def test_folded_heads_attend_as_repeated_ones(num_groups: int) -> None:
    torch.manual_seed(0)
    for sizes in ((1, 1, 2, 9), (1, 2, 17, 130), (3, 3, 5, 77)):
        query, key, value, mask = make_inputs(sizes[0], num_groups, *sizes[1:], torch.float64)
        key, value = key.clone(), value[..., :6]
        expected = nn.functional.scaled_dot_product_attention(
            query, repeat_kv(key, num_groups), repeat_kv(value, num_groups), attn_mask=mask, scale=0.3
        )
        for given in (mask, mask == 0):
            torch.testing.assert_close(attend_folded(query, key, value, given, 0.3), expected, rtol=0, atol=1e-12)


@pytest.fixture
def copies() -> Iterator[list[Any]]:
    """
    Calls in which transformers' function repeats the heads of states. The function is watched and not replaced,
    because a target with a function of others would verify chains.
    """
    found, watched = list[Any](), sdpa_attention.repeat_kv.__code__

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is watched:
            found.append(SimpleNamespace(args=(frame.f_locals["hidden_states"],)))

    sys.setprofile(note)
    threading.setprofile(note)
    yield found
    sys.setprofile(None)
    threading.setprofile(None)


OTHERS = {"dropout": 0.5, "position_bias": torch.ones(1, 4, 3, 7), "output_attentions": True, "s_aux": torch.zeros(4)}


@pytest.mark.parametrize("option", OTHERS)
def test_other_attention_is_left_to_the_function_it_has(option: str, copies: list[Any]) -> None:
    query, key, value, mask = make_inputs(1, 2, 2, 3, 7, torch.float32)
    with gqa_without_copies():
        ALL_ATTENTION_FUNCTIONS["sdpa"](Layer(2), query, key, value, mask, **{option: OTHERS[option]})
    assert copies


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2_mixed", "gemma3", "phi3", "mixtral"])
def test_a_generation_repeats_no_head_after_the_prompt(family: str, copies: list[Any]) -> None:
    target = make_target(family, "sdpa", num_layers=3)
    drafter = make_drafter(target, num_assistant_tokens=15)
    for lengths in ([9], [9, 4]):
        prompts = make_prompts(lengths)
        plain = target.generate(**prompts, max_new_tokens=24, do_sample=False)
        copies.clear()
        drafted = target.generate(**prompts, max_new_tokens=24, do_sample=False, assistant_model=drafter)
        assert torch.equal(drafted, plain)
        assert all(copy.args[0].shape[2] == 9 for copy in copies), "of the prompt alone"


def test_nobody_else_is_affected(copies: list[Any]) -> None:
    target, prompts = make_target("llama", "sdpa", num_layers=3), make_prompts([5, 3])
    ids, mask = prompts["input_ids"], prompts["attention_mask"]

    def run() -> int:
        copies.clear()
        target(ids, attention_mask=mask)
        return len(copies)

    expected = run()
    assert expected > 0
    counts: list[int] = []
    with gqa_without_copies():
        assert run() == 0
        other = threading.Thread(target=lambda: counts.append(run()))
        other.start()
        other.join()
        with gqa_without_copies():
            pass
        assert run() == 0, "what is within ends alone"
    assert counts == [expected]
    assert run() == expected
    with pytest.raises(AttributeError), gqa_without_copies():
        target(ids, attention_mask="none")
    assert run() == expected
    assert attention_implementation(target.config) == "sdpa"


def test_a_function_that_somebody_registered_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with gqa_without_copies():
        ours = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with gqa_without_copies():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is ours, "nothing is put on top of it"
    assert ours.__wrapped__ is sdpa_attention_forward
    calls: list[int] = []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", theirs)  # noqa: SLF001
    target = make_target("llama", "sdpa", num_layers=3)
    equals_plain(target, make_drafter(target, num_assistant_tokens=7), max_new_tokens=12)
    assert calls
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs


@pytest.mark.parametrize("lengths", [[9], [9, 4]])
def test_masks_are_folded_once_in_a_pass(lengths: list[int], calls_of: Any) -> None:
    target = make_target("mistral", "sdpa", num_layers=3).float()
    drafter = make_drafter(target, num_assistant_tokens=15)
    prompts = make_prompts(lengths)
    expected = target.generate(**prompts, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    calls = calls_of(attention, "scaled_dot_product_attention")
    with pretending():
        target.to("cuda")
        drafter.to("cuda")
        output = target.generate(
            **{name: values.to("cuda") for name, values in prompts.items()},
            max_new_tokens=12, do_sample=False, assistant_model=drafter, return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(output.sequences.cpu(), expected)
    used = [call.kwargs["attn_mask"] for call in calls]
    # The drafter has fewer layers than the target.
    num_shared = list(Counter(map(id, used)).values()).count(target.config.num_hidden_layers)
    assert num_shared == sum(size > 0 for size in output.tree_sizes) > 2, "one in each pass over a tree"
    assert all(stride % 16 == 0 for mask in used for stride in mask.stride()[:-1])
