"""Targets with adapters: each state of the adapters decodes its own plain text, one after the other in one process."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, PrefixTuningConfig, PromptLearningConfig, PromptTuningConfig, get_peft_model
from refusals import refuses
from targets import make_drafter, make_prompts, make_target
from transformers.integrations.peft import MIN_PEFT_VERSION

from transformers_gumiho import GumihoModel
from transformers_gumiho.internals import CACHE_NAME


def lora(**settings: Any) -> LoraConfig:
    """Returns an adapter that changes what a target writes; also at the output head, which the drafter shares."""
    modules = ["q_proj", "down_proj", "lm_head"]
    return LoraConfig(r=4, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM", **settings)


def equals_plain(target: torch.nn.Module, drafter: GumihoModel) -> torch.Tensor:
    """Asserts that drafted texts, greedy and sampled, equal plain ones; returns the greedy one."""
    for lengths, do_sample in (([6], True), ([6, 4], False)):
        texts = []
        for assistant in ({}, {"assistant_model": drafter}):
            torch.manual_seed(0)
            prompts = make_prompts(lengths)
            texts.append(target.generate(**prompts, max_new_tokens=24, do_sample=do_sample, **assistant))
        assert torch.equal(*texts)
    return texts[0]


def test_peft_model_in_all_its_states() -> None:
    target = make_target()
    drafter = make_drafter(target, num_assistant_tokens=31)
    base = equals_plain(target, drafter)
    torch.manual_seed(1)
    adapted = get_peft_model(target, lora(), adapter_name="first").eval()
    adapted.add_adapter("second", lora())
    texts = {}
    for name in ("first", "second", "first"):
        adapted.set_adapter(name)
        text = equals_plain(adapted, drafter)
        assert torch.equal(text, texts.setdefault(name, text))
        with adapted.disable_adapter():
            assert torch.equal(equals_plain(adapted, drafter), base)
    adapted.merge_adapter(["second"])
    assert torch.equal(equals_plain(adapted, drafter), texts["second"])
    adapted.unmerge_adapter()
    assert torch.equal(equals_plain(adapted, drafter), texts["first"])
    assert torch.equal(equals_plain(adapted.merge_and_unload(adapter_names=["second"]), drafter), texts["second"])
    assert len({tuple(text.flatten().tolist()) for text in (base, texts["first"], texts["second"])}) == 3


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"this transformers needs peft {MIN_PEFT_VERSION} for adapters of its own",
)
def test_adapters_of_the_model_itself() -> None:
    """As `model.load_adapter` leaves them: the target is no `PeftModel`, but its layers hold adapters."""
    target = make_target()
    drafter = make_drafter(target, num_assistant_tokens=31)
    torch.manual_seed(1)
    texts = {"base": equals_plain(target, drafter)}
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
        text = equals_plain(target, drafter)
        assert torch.equal(text, texts.setdefault(name.removesuffix(" again"), text))
    assert len({tuple(text.flatten().tolist()) for text in texts.values()}) == 4


def test_an_adapter_switched_while_a_text_goes_on() -> None:
    """A following call goes on from the returned cache under another adapter, as a plain one does."""
    target = make_target()
    drafter = make_drafter(target, num_assistant_tokens=31)
    torch.manual_seed(1)
    adapted = get_peft_model(target, lora(), adapter_name="first").eval()
    adapted.add_adapter("second", lora())
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


def test_one_adapter_for_each_row() -> None:
    """`adapter_names` gives the rows of a batch adapters of their own."""
    target = make_target()
    drafter = make_drafter(target, num_assistant_tokens=31)
    torch.manual_seed(1)
    adapted = get_peft_model(target, lora(), adapter_name="first").eval()
    adapted.add_adapter("second", lora())
    settings = {"max_new_tokens": 24, "do_sample": False, "adapter_names": ["first", "second", "__base__"]}
    plain = adapted.generate(**make_prompts([6, 6, 6]), **settings)
    assert len({tuple(row.tolist()) for row in plain[:, 6:]}) == 3
    assert torch.equal(adapted.generate(**make_prompts([6, 6, 6]), **settings, assistant_model=drafter), plain)


def test_activated_lora_is_refused() -> None:
    """It acts on the newest tokens of each pass, of which passes over drafts have more."""
    target, invocation = make_target(), make_prompts([6])["input_ids"][0, 3:5].tolist()
    drafter = make_drafter(target, num_assistant_tokens=15)
    base = equals_plain(target, drafter)
    adapted = get_peft_model(target, lora(alora_invocation_tokens=invocation)).eval()
    refuses(adapted, "is an activated LoRA", drafter, **make_prompts([6]))
    with adapted.disable_adapter():
        assert torch.equal(equals_plain(adapted, drafter), base)


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_are_refused(config: type[PromptLearningConfig]) -> None:
    target = make_target()
    drafter = make_drafter(target, num_assistant_tokens=15)
    base = equals_plain(target, drafter)
    adapted = get_peft_model(target, config(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    refuses(adapted, f"{config.__name__} puts virtual tokens before the prompt", drafter)
    with adapted.disable_adapter():
        assert torch.equal(equals_plain(adapted, drafter), base)
