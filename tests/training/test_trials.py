"""What fits on an accelerator is tried: passes are halved until they fit, in all processes alike."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_target import make_chat_target, write_chat_target
from commands import gumiho, refuse
from pretend_device import pretending
from transformers import DynamicCache

from transformers_gumiho.training import GumihoTrainer, OnlineFeatures
from transformers_gumiho.training.recipe import trials
from transformers_gumiho.training.recipe.arguments import RecipeArguments
from transformers_gumiho.training.recipe.stages import Run
from transformers_gumiho.training.recipe.trials import Trial, largest_that_fits


def make_trial(tried: list[int], fits_until: int) -> Trial:
    def run(size: int) -> None:
        tried.append(size)
        if size > fits_until:
            raise torch.OutOfMemoryError("out of memory")

    return Trial("heads", run, 24, 5)


def test_passes_are_halved_down_to_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    tried: list[int] = []
    assert largest_that_fits(make_trial(tried, 6), torch.device("cpu")) == 6
    assert tried == [24, 12, 6]
    assert "too much memory: next with 12 tokens" in capsys.readouterr().out
    tried.clear()
    message = "stage 'heads' does not fit on cpu with 5 tokens, .* What helps: a smaller --tokens_per_pass"
    with pytest.raises(ValueError, match=message):
        largest_that_fits(make_trial(tried, 4), torch.device("cpu"))
    assert tried == [24, 12, 6, 5]
    other = Trial("heads", lambda size: torch.zeros(2).view(size), 24, 5)
    with pytest.raises(RuntimeError, match="shape"):  # which is no lack of memory
        largest_that_fits(other, torch.device("cpu"))


@pytest.mark.parametrize(
    ("stage", "largest", "expected"),
    [
        # The feed-forward layers are 48 wide, and logits 4,097.
        (trials._features, 4 * 32 * 48, 4 * 32),  # noqa: SLF001
        (trials._writing, 2 * 4097, 2),  # noqa: SLF001
        (trials._decoding, 1e9, 24),  # noqa: SLF001
    ],
)
def test_stages_try_their_largest_passes_on_the_device(
    stage: Any, largest: float, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    target = make_chat_target()
    with pretending() as machine:
        target.to("cuda:0")
        run = SimpleNamespace(
            target=target, target_config=target.config, layers=None, fields={}, longest_row=32,
            training_args=SimpleNamespace(pass_budget=8 * 32),
            args=RecipeArguments(max_length=32, max_new_tokens=24, writing_batch_size=8, cache_features="true"),
        )  # fmt: skip
        machine.largest = largest
        assert largest_that_fits(stage(run), torch.device("cuda:0")) == expected
    assert f"{expected:,} " in capsys.readouterr().out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target that chats, and questions for it."""
    return write_chat_target(tmp_path_factory.mktemp("tried"))


@pytest.mark.parametrize("cache_features", ["true", "false"])
def test_a_run_keeps_to_what_its_trials_found(
    folder: Path, cache_features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device with memory for 128 tokens of a step and of the target, and for the cache of 8 answers."""
    most = {"trained": 0, "read": 0, "written": 0}

    def limit(owner: Any, name: str, kind: str, allowed: int, size_of: Any) -> None:
        real = getattr(owner, name)

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            size = size_of(self, *args)
            if size > allowed:
                raise torch.OutOfMemoryError("out of memory")
            most[kind] = max(most[kind], size)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    def trained(self: Any, model: Any, inputs: Any, *_: Any) -> int:
        return inputs["input_ids"].numel() if model.training else 0

    limit(GumihoTrainer, "compute_loss", "trained", 128, trained)
    limit(OnlineFeatures, "states", "read", 128, lambda self, inputs: inputs["input_ids"].numel())
    limit(DynamicCache, "update", "written", 8, lambda self, keys, *_: len(keys) if keys.shape[2] == 1 else 0)
    monkeypatch.setattr(Run, "has_accelerator", True)
    command = [
        "train", "--target", folder / "target", "--data", folder / "questions.jsonl", "--use_cpu", "--max_steps", 2,
        "--output_dir", folder / cache_features, "--cache_features", cache_features, "--num_eval_rows", 4,
        "--max_new_tokens", 12, "--max_length", 64, "--tokens_per_step", 512, "--tokens_per_pass", 512,
        "--stages", "write", "features", "train",
    ]  # fmt: skip
    output = gumiho(*command)
    assert "tried serial" in output
    assert "tried heads" in output
    assert "tokens_per_pass: 128\n" in output
    assert "writing_batch_size: 8\n" in output
    assert max(most.values()) == most["trained"] <= 128
    assert most["written"] == 8
    assert (folder / cache_features / "model.safetensors").exists()
    if cache_features == "true":
        fresh = [*command, "--output_dir", folder / "other", "--max_length", 200]
        refuse("The stage 'serial' does not fit on cpu with 200 tokens, and there can be no fewer. What helps", *fresh)
        refuse("--max_length, --loss_chunk_size", *fresh)
