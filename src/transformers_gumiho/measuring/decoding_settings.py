"""Decoding settings of a drafter for as long as something is measured with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..model.modeling_gumiho import GumihoModel


# What tells of the drafter alone.
DRAFTER_ALONE: dict[str, Any] = {"prompt_lookup_num_tokens": 0}


@contextmanager
def decoding_settings(drafter: GumihoModel, settings: dict[str, Any]) -> Iterator[None]:
    """Gives the drafter these decoding settings for as long as it lasts."""
    config = drafter.generation_config
    before = {name: getattr(config, name, None) for name in settings}
    config.update(**settings)
    try:
        yield
    finally:
        config.update(**before)
