"""lm-evaluation-harness: its Python interface with a target that has a drafter, its command line with a folder."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.__main__ import cli_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerFast


PROMPTS = [
    "def __init__(self, name):\n",
    "import os\nimport sys\n\n\nclass Reader:\n    def read(self",
    "class A:\n",
    "    for name in names:\n        if name ",
    "    def test_equal(self):\n        self.assert",
]
# One task for each way of generating. The texts of the second one end at a stop string.
TASKS: dict[str, dict[str, Any]] = {
    "greedy": {"until": []},
    "until": {"until": ["\n", "self"]},
    "sampled": {"until": [], "do_sample": True, "temperature": 0.8},
}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    for name, settings in TASKS.items():
        task = {
            "task": f"gumiho_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "prompts.jsonl")}},
            "output_type": "generate_until",
            "test_split": "test",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "pass",
            "generation_kwargs": settings | {"max_gen_toks": 32},
            "metric_list": [{"metric": "exact_match"}],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


def answers(results: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the texts of each task."""
    return {name: [sample["resps"][0][0] for sample in samples] for name, samples in results["samples"].items()}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_python(compare: Callable[..., Any], tokenizer: PreTrainedTokenizerFast, tasks: Path, batch_size: int) -> None:
    def evaluate(target: PreTrainedModel) -> dict[str, list[str]]:
        model = HFLM(pretrained=target, tokenizer=tokenizer, batch_size=batch_size, device="cpu")
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        return answers(
            lm_eval.simple_evaluate(
                model=model, tasks=[f"gumiho_{name}" for name in TASKS], task_manager=manager, bootstrap_iters=0
            )
        )

    texts = compare(evaluate)
    assert all(len(of_task) == len(PROMPTS) for of_task in texts.values())
    assert any(texts["gumiho_greedy"])
    assert not any("self" in text or "\n" in text for text in texts["gumiho_until"])


@pytest.mark.parametrize("batch_size", [1, 4])
def test_command_line(
    count: Callable[..., Any],
    chat_target: Path,
    served: Path,
    tasks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
) -> None:
    def evaluate(folder: Path) -> list[Any]:
        output = tmp_path / f"results_{folder.name}"
        arguments = f"pretrained={folder},dtype=float32,trust_remote_code=True"
        command = ["lm_eval", "--model", "hf", "--model_args", arguments, "--batch_size", str(batch_size)]
        command += ["--tasks", "gumiho_greedy,gumiho_until", "--include_path", str(tasks), "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", [*command, "--output_path", str(output), "--log_samples"])
        cli_evaluate()
        lines = [line for path in sorted(output.rglob("samples_*")) for line in path.read_text().splitlines()]
        return [sample["resps"] for sample in sorted(map(json.loads, lines), key=lambda sample: sample["prompt_hash"])]

    plain = count(lambda: evaluate(chat_target))
    drafted = count(lambda: evaluate(served))
    assert len(plain.result) == 2 * len(PROMPTS)
    assert drafted.result == plain.result
    assert drafted.num_passes < plain.num_passes
