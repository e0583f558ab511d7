"""The installed vLLM has what the plug-in needs of it, read from its sources as Python itself finds it."""

import importlib
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import vllm
from choose_vllm_tokens import schedule
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from transformers_gumiho.vllm.contract import DIGESTS, HOOKS, digest, read_hooks


def test_the_installed_release_is_a_tested_one() -> None:
    command = [sys.executable, "-m", "transformers_gumiho.vllm.contract"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    *lines, last = done.stdout.splitlines()
    assert len(lines) == sum(map(len, HOOKS.values()))
    assert all(line.endswith(": ok") for line in lines)
    assert last == f"The plug-in has been tested with vLLM {vllm.__version__.split('+')[0]}."


def test_sources_are_those_that_python_finds() -> None:
    """Of each method, its parameters and its body; a parameter that Python does not find would be reported."""
    assert {hook.name for hook in read_hooks(Path(vllm.__file__).parents[1])} >= DIGESTS.keys()
    for (module, owner), members in HOOKS.items():
        found = getattr(importlib.import_module(module), owner)
        for member, needed in members.items():
            if not needed:
                continue
            function = inspect.unwrap(getattr(found, member) if member else found)
            names = list(inspect.signature(function).parameters)
            assert [name for name in names if name in needed.split()] == needed.removesuffix(" ...").split()
            if known := DIGESTS.get(f"{owner}.{member}"):
                source = textwrap.dedent(inspect.getsource(function))
                source = source[source.index("def ") :]  # without its decorators
                assert digest(source.rstrip()) in known


def test_chosen_lengths_are_read_as_they_are_meant() -> None:
    ranges = schedule({1: {0: 1.0, 7: 2.0}, 4: {0: 1.0, 2: 1.5}, 16: {0: 1.0, 2: 0.8}})
    # Beyond the last range, its length goes on.
    assert build_dynamic_sd_schedule_lookup(ranges, 20, 7)[1:] == [7] * 2 + [2] * 6 + [0] * 12
