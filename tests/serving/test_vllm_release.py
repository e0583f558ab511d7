"""The installed vLLM has what the plug-in needs of it."""

import importlib

import pytest
import vllm
from choose_vllm_tokens import schedule
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from transformers_gumiho.vllm.contract import caution


# Each compares what it uses of vLLM with the installed release when it is imported.
@pytest.mark.parametrize("name", ["configuration", "model", "proposer", "serial_speculator"])
def test_the_installed_release_fits(name: str) -> None:
    importlib.import_module(f"transformers_gumiho.vllm.{name}")


def test_the_installed_release_is_a_tested_one() -> None:
    assert caution(vllm.__version__) == ""
    assert "has not been tested with vLLM 0.99.0" in caution("0.99.0")


def test_chosen_lengths_are_read_as_they_are_meant() -> None:
    ranges = schedule({1: {0: 1.0, 7: 2.0}, 4: {0: 1.0, 2: 1.5}, 16: {0: 1.0, 2: 0.8}})
    # Beyond the last range, its length goes on.
    assert build_dynamic_sd_schedule_lookup(ranges, 20, 7)[1:] == [7] * 2 + [2] * 6 + [0] * 12
