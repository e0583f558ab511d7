"""The tests themselves: what transformers is going to drop fails a test that uses it."""

from pathlib import Path

import pytest


pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
TESTS = """
import warnings
import pytest
from transformers.utils import logging

logger = logging.get_logger("transformers.generation.utils")

def say():
    logger.warning_once("Passing `this` is deprecated and will be removed in future versions.")

def test_logged():
    say()

def test_logged_again():
    say()

@pytest.mark.transformers_deprecates("Passing `this`")
def test_excepted():
    say()

@pytest.mark.transformers_deprecates("Passing `that`")
def test_another_is_excepted():
    say()

def test_other_warnings():
    logger.warning("This is slow.")

@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
def test_warned(category):
    warnings.warn("`this` goes away", category)
"""


# In the same process, whose own fixture sees the messages, too.
@pytest.mark.transformers_deprecates("^Passing `this` is deprecated")
def test_deprecations_are_errors(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makefile(".toml", pyproject=(ROOT / "pyproject.toml").read_text())
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--override-ini=addopts=", "--tb=short")
    outcomes = {line.split("::")[1].split()[0] for line in result.outlines if line.startswith(("FAILED", "ERROR"))}
    assert outcomes == {
        "test_logged", "test_logged_again", "test_another_is_excepted",
        "test_warned[DeprecationWarning]", "test_warned[FutureWarning]",
    }  # fmt: skip


@pytest.mark.transformers_deprecates("^Passing `generation_config` together")
def test_only_calls_of_ours_count(pytester: pytest.Pytester) -> None:
    """transformers' own assistants pass `generate()` what it calls deprecated, and are not ours to mend."""
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makefile(".toml", pyproject=(ROOT / "pyproject.toml").read_text())
    pytester.makepyfile(
        """
        import torch
        from targets import make_target
        from transformers import GenerationConfig

        IDS = torch.tensor([[1, 2, 3]])

        def test_theirs():
            make_target().generate(IDS, assistant_model=make_target(seed=1), max_new_tokens=4, do_sample=False)

        def test_ours():
            make_target().generate(IDS, generation_config=GenerationConfig(do_sample=False), max_new_tokens=4)
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "--override-ini=addopts=", "--tb=short")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines("ERROR *::test_ours *")
