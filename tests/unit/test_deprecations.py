"""The tests themselves: what transformers is going to drop fails a test that uses it."""

from pathlib import Path

import pytest


pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]


@pytest.mark.transformers_deprecates("^Passing `generation_config` together")
def test_only_calls_of_ours_count(pytester: pytest.Pytester) -> None:
    """transformers' own assistants pass `generate()` what it calls deprecated, and are not ours to change."""
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
