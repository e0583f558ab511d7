"""EAGLE heads and block drafters in every command that takes a drafter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from block import make_block_model
from commands import gumiho
from eagle import publish
from training_data import DEMO_TARGET, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from transformers_gumiho import GumihoModel
from transformers_gumiho.tools.presenting import command


EAGLE3 = {"serial_head": "eagle3", "draft_vocab_size": 512}


def interrupt(_: float) -> None:
    raise KeyboardInterrupt


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # What the published head is, and what is added to it.
    "eagle1": ({}, {}),
    "eagle3": (EAGLE3, {}),
    "block": ({}, {}),
    "eagle3 with heads": (EAGLE3, {"num_serial_tokens": 2, "num_parallel_heads": 2, "transition_rank": 4}),
}


@pytest.mark.usefixtures("short_contests")
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_command_takes_a_head_of_another_method(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradio = pytest.importorskip("gradio")
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    fields, added = KINDS[kind]
    torch.manual_seed(0)
    head = tmp_path / "head"
    if kind == "block":
        make_block_model(target).save_pretrained(head)
    else:
        new = GumihoModel.from_target(target, num_hidden_layers=1, num_parallel_heads=0, num_serial_tokens=4, **fields)
        publish(head, new, torch.float32)
    if added:
        GumihoModel.from_pretrained(head, **added).save_pretrained(head := tmp_path / "added")
    pair = ["--target", DEMO_TARGET, "--assistant", head, "--dtype", "float32"]
    prompt = "def __init__(self, name):"

    written = gumiho("generate", *pair, "--prompt", prompt, "--max_new_tokens", 12, "--compare")
    assert written.rstrip().endswith("same text")
    assert "drawn into" in gumiho("show", *pair, "--prompt", prompt, "--output", tmp_path / "tree.svg")
    prompts = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": prompt}, {"prompt": "import "}, {"prompt": "for "}])
    measured = [*pair, "--prompts", prompts, "--output_dir", tmp_path / "out", "--max_new_tokens", 4]
    gumiho("benchmark", *measured, "--modes", "plain", "gumiho")
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["rows"]
    assert [row["num_equal"] for row in rows if row["mode"] == "gumiho"] == [3]
    gumiho("tune", *measured, "--num_prompts", 3, "--batch_sizes", 1)
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert 1 <= settings["tree_depth"] <= GumihoModel.from_pretrained(head).config.max_draft_depth
    gumiho("attach", DEMO_TARGET, head, "--output_dir", tmp_path / "served")
    served = AutoModelForCausalLM.from_pretrained(tmp_path / "served", dtype=torch.float32, trust_remote_code=True)
    ids = AutoTokenizer.from_pretrained(DEMO_TARGET)(prompt, return_tensors="pt")["input_ids"]
    call = {"max_new_tokens": 12, "return_dict_in_generate": True, "do_sample": False}
    drafted = served.generate(ids, trust_remote_code=True, **call)
    assert torch.equal(drafted.sequences, target.generate(ids, **call).sequences)
    assert drafted.accepted_lengths
    pages: list[Any] = []
    monkeypatch.setattr(gradio.Blocks, "launch", lambda page, **_: (pages.append(page), "", ""))
    monkeypatch.setattr(command.time, "sleep", interrupt)
    with pytest.raises(SystemExit, match="130"):
        gumiho("demo", *pair)
    assert [page.host.is_closed for page in pages] == [True]
