"""What the plug-in needs of vLLM: each name that is missing or differs is found by reading the sources."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_sources import write_sources

from transformers_gumiho.vllm import contract
from transformers_gumiho.vllm.contract import HOOKS, caution, digest, read_hooks, read_version, refusal


NAMES = [f"{owner}.{member}" if member else owner for (_, owner), members in HOOKS.items() for member in members]
EAGLE = Path("vllm", "v1", "spec_decode", "eagle.py")


def faults(root: Path) -> dict[str, str]:
    return {hook.name: hook.fault for hook in read_hooks(root) if hook.fault}


def test_all_that_is_needed_is_enough(tmp_path: Path) -> None:
    hooks = list(read_hooks(write_sources(tmp_path)))
    assert [hook.name for hook in hooks] == NAMES
    assert refusal(hooks, "0.32.0") == ""


@pytest.mark.parametrize("name", NAMES)
def test_what_is_missing_is_named(name: str, tmp_path: Path) -> None:
    found = faults(write_sources(tmp_path, without=name))
    assert [re.match("is not in vllm", fault) for fault in found.values()] != [None]
    assert {other.split(".")[0] for other in found} == {name.split(".")[0]}
    assert name in found or any(other.startswith(f"{name}.") for other in found)


@pytest.mark.parametrize(
    ("now", "fault"),
    [
        ("def set_inputs_first_pass(self, num_tokens, *others): ...", "has no parameter `target_hidden_states`"),
        ("def set_inputs_first_pass(self, target_hidden_states, another): ...", None),
        ("set_inputs_first_pass = 1", "is not a function"),
        ("@property\n    def set_inputs_first_pass(\n        self, target_hidden_states\n    ):\n        ...", None),
    ],
)
def test_parameters_that_are_passed_on(now: str, fault: str | None, tmp_path: Path) -> None:
    file = write_sources(tmp_path) / EAGLE
    file.write_text(
        file.read_text().replace("def set_inputs_first_pass(self, target_hidden_states, *others): ...", now)
    )
    assert faults(tmp_path).get("EagleProposer.set_inputs_first_pass") == fault


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ("self, hidden_states, sampling_metadata, other=1, *, another=2", None),
        ("self, hidden_states, sampling_metadata, other", "needs `other` as well"),
        ("self, hidden_states, sampling_metadata, *, other", "needs `other` as well"),
        ("self, sampling_metadata, hidden_states", "has its parameters in another order"),
    ],
)
def test_parameters_of_what_the_plug_in_calls(parameters: str, fault: str | None, tmp_path: Path) -> None:
    file = write_sources(tmp_path) / EAGLE
    file.write_text(file.read_text().replace("self, hidden_states, sampling_metadata", parameters))
    found = faults(tmp_path)
    assert found.keys() == ({"EagleProposer._sample_draft_tokens"} if fault else set())
    assert fault is None or found["EagleProposer._sample_draft_tokens"].startswith(fault)


def test_bases_and_imports_are_followed(tmp_path: Path) -> None:
    file = write_sources(tmp_path) / EAGLE
    base = file.read_text().replace("class EagleProposer", "class Base")
    (file.parent / "base.py").write_text(base)
    file.write_text("from .base import (\n    Base,\n)\n\n\nclass EagleProposer(Base, metaclass=type):\n    pass\n")
    assert faults(tmp_path) == {}
    (file.parent / "base.py").write_text(base.replace("dummy_run", "profile_run"))
    assert faults(tmp_path) == {"EagleProposer.dummy_run": "is not in vllm.v1.spec_decode.eagle"}


def test_a_changed_body_is_named_and_a_release_that_was_not_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "def set_inputs_first_pass(self, target_hidden_states, *others): ..."
    monkeypatch.setattr(contract, "DIGESTS", {"EagleProposer.set_inputs_first_pass": f"00000000 {digest(body)}"})
    root = write_sources(tmp_path, "0.320.1")
    hooks = list(read_hooks(root))
    assert [hook for hook in hooks if hook.is_changed] == []
    assert caution(hooks, "0.32.1") == ""
    assert "has not been tested with vLLM 0.320.1, but with 0.31, 0.32" in caution(hooks, read_version(root))
    (root / EAGLE).write_text((root / EAGLE).read_text().replace(body, f"{body[:-3]}return 1"))
    hooks = list(read_hooks(root))
    assert [hook.name for hook in hooks if hook.is_changed] == ["EagleProposer.set_inputs_first_pass"]
    assert "vLLM has changed EagleProposer.set_inputs_first_pass" in caution(hooks, "0.32.1")


def test_the_check_needs_the_standard_library_alone() -> None:
    code = f"import runpy, sys; runpy.run_path({contract.__file__!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
