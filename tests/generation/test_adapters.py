"""Targets with adapters: each state of the adapters decodes its own plain text, one after the other in one process."""

from collections.abc import Callable
from contextlib import nullcontext
from inspect import signature
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, PeftConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from refusals import refuses
from targets import Pair, equals_plain, make_drafter, make_prompts, make_target
from transformers import PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION

from transformers_gumiho import GumihoModel
from transformers_gumiho.internals import CACHE_NAME


def lora(**settings: Any) -> LoraConfig:
    """Returns an adapter that changes what a target writes; also at the output head, which the drafter shares."""
    modules = ["q_proj", "down_proj", "lm_head"]
    return LoraConfig(r=4, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM", **settings)


@pytest.fixture
def pair() -> Pair:
    target = make_target()
    return target, make_drafter(target, num_assistant_tokens=31)


def with_two_adapters(target: PreTrainedModel) -> PeftModel:
    """Puts the adapters "first" and "second" into a target."""
    torch.manual_seed(1)
    adapted = get_peft_model(target, lora(), adapter_name="first").eval()
    adapted.add_adapter("second", lora())
    return adapted


def text_of(target: torch.nn.Module, drafter: GumihoModel) -> torch.Tensor:
    """Asserts that drafted texts, sampled and greedy, equal plain ones; returns the greedy one."""
    equals_plain(target, drafter, lengths=[6], max_new_tokens=24, do_sample=True)
    return equals_plain(target, drafter, lengths=[6, 4], max_new_tokens=24).sequences


@pytest.mark.skipif("ensure_weight_tying" not in signature(LoraConfig).parameters, reason="of newer releases")
def test_the_head_of_an_embedding_that_is_trained_with_an_adapter() -> None:
    """PEFT gives the width of the states as the head's `out_features`, here more than the vocabulary has tokens."""
    target = make_target(vocab_size=24)
    target.config.tie_word_embeddings = True
    target.tie_weights()
    drafter = make_drafter(target)
    config = lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    config.target_modules = {"q_proj"}
    adapted = get_peft_model(target, config).double().eval()
    assert target.get_output_embeddings().out_features == 32
    equals_plain(adapted, drafter, lengths=[6], max_new_tokens=16)


def test_peft_model_in_all_its_states(pair: Pair) -> None:
    target, drafter = pair
    base = text_of(target, drafter)
    adapted = with_two_adapters(target)
    texts = {}
    for name in ("first", "second", "first"):
        adapted.set_adapter(name)
        text = text_of(adapted, drafter)
        assert torch.equal(text, texts.setdefault(name, text))
        with adapted.disable_adapter():
            assert torch.equal(text_of(adapted, drafter), base)
    adapted.merge_adapter(["second"])
    assert torch.equal(text_of(adapted, drafter), texts["second"])
    adapted.unmerge_adapter()
    assert torch.equal(text_of(adapted, drafter), texts["first"])
    assert torch.equal(text_of(adapted.merge_and_unload(adapter_names=["second"]), drafter), texts["second"])
    assert len({tuple(text.flatten().tolist()) for text in (base, texts["first"], texts["second"])}) == 3


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"this transformers needs peft {MIN_PEFT_VERSION} for adapters of its own",
)
def test_adapters_of_the_model_itself(pair: Pair) -> None:
    """As `model.load_adapter` leaves them: the target is no `PeftModel`, but its layers hold adapters."""
    target, drafter = pair
    texts = {"base": text_of(target, drafter)}
    torch.manual_seed(1)
    target.add_adapter(lora(), adapter_name="first")
    target.add_adapter(lora(), adapter_name="second")
    states: dict[str, Callable[[], None]] = {
        "first": lambda: target.set_adapter("first"),
        "second": lambda: target.set_adapter("second"),
        "both": lambda: target.set_adapter(["first", "second"]),
        "base": target.disable_adapters,
        "both again": target.enable_adapters,
    }
    for name, switch in states.items():
        switch()
        text = text_of(target, drafter)
        assert torch.equal(text, texts.setdefault(name.removesuffix(" again"), text))
    assert len({tuple(text.flatten().tolist()) for text in texts.values()}) == 4


def test_an_adapter_switched_while_a_text_goes_on(pair: Pair) -> None:
    """A following call goes on from the returned cache under another adapter, as a plain one does."""
    target, drafter = pair
    adapted = with_two_adapters(target)
    texts = []
    for assistant in ({}, {"assistant_model": drafter}):
        ids, cache = make_prompts([6])["input_ids"], None
        for name in ("first", "second", None):
            adapted.set_adapter(name or "first")
            with nullcontext() if name else adapted.disable_adapter():
                output = adapted.generate(
                    input_ids=ids, **{CACHE_NAME: cache}, max_new_tokens=12, do_sample=False,
                    return_dict_in_generate=True, **assistant,
                )  # fmt: skip
            ids, cache = output.sequences, output[CACHE_NAME]
        texts.append(ids)
    assert torch.equal(*texts)


def test_one_adapter_for_each_row(pair: Pair) -> None:
    """`adapter_names` gives the rows of a batch adapters of their own."""
    target, drafter = pair
    settings = {**make_prompts([6, 6, 6]), "adapter_names": ["first", "second", "__base__"]}
    text = equals_plain(with_two_adapters(target), drafter, **settings, max_new_tokens=24).sequences
    assert len({tuple(row.tolist()) for row in text[:, 6:]}) == 3


VIRTUAL_TOKENS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}


@pytest.mark.parametrize(
    ("make_adapter", "message"),
    [
        # It acts on the newest tokens of each pass, of which passes over drafts have more.
        (lambda prompt: lora(alora_invocation_tokens=prompt[3:5]), "is an activated LoRA"),
        (lambda _: PromptTuningConfig(**VIRTUAL_TOKENS), "PromptTuningConfig puts virtual tokens before the prompt"),
        (lambda _: PrefixTuningConfig(**VIRTUAL_TOKENS), "PrefixTuningConfig puts virtual tokens before the prompt"),
    ],
    ids=["activated LoRA", "prompt tuning", "prefix tuning"],
)
def test_adapters_that_are_refused(make_adapter: Callable[..., PeftConfig], message: str, pair: Pair) -> None:
    target, drafter = pair
    prompt = make_prompts([6])
    base = text_of(target, drafter)
    adapted = get_peft_model(target, make_adapter(prompt["input_ids"][0].tolist())).eval()
    refuses(adapted, message, drafter, **prompt)
    with adapted.disable_adapter():
        assert torch.equal(text_of(adapted, drafter), base)
