"""Calls that are refused before anything runs."""

from typing import Any

import pytest
from targets import make_drafter, make_prompts, make_target
from transformers import PreTrainedModel

from transformers_gumiho import GumihoModel


def refuses(target: PreTrainedModel, message: str, drafter: GumihoModel | None = None, **kwargs: Any) -> None:
    """Asserts that the call is refused with this message, and that the target's weights were not touched."""
    drafter = drafter or make_drafter(make_target())
    ran = []
    handles = [module.register_forward_pre_hook(lambda *_: ran.append(1)) for module in (target, drafter)]
    try:
        with pytest.raises(ValueError, match=message):
            target.generate(**({**make_prompts([4]), "max_new_tokens": 4} | kwargs), assistant_model=drafter)
    finally:
        for handle in handles:
            handle.remove()
    assert not ran
