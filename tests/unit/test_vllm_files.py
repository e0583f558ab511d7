"""vLLM's Gumiho loader reads what is saved here, and drafts from it the chain of `branching_factor=1`."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_trees import recorded_drafts
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from targets import make_drafter, make_prompts, make_target
from trained_pair import FOLDER as DEMO_PAIR
from trained_pair import load_tokenizer
from trainers import make_rows, trained
from vllm_reader import VllmDrafter, read_config, read_names

from transformers_gumiho import GumihoConfig, GumihoModel
from transformers_gumiho.generation.verification.target_states import output_head


ROOT = Path(__file__).parents[2]
NO_HEAD: Any = None


def of_trainer(folder: Path) -> None:
    trained(make_target(num_layers=3).float(), folder, max_steps=1, train_dataset=make_rows(4)).save_model(folder)


def merged(folder: Path) -> None:
    wrapped = get_peft_model(
        make_drafter(make_target(num_layers=3)), LoraConfig(r=2, target_modules=["q_proj", "fc", "linear"])
    )
    assert isinstance(wrapped, PeftModel)
    wrapped.merge_and_unload().save_pretrained(folder)


def demo_pair(folder: Path) -> None:
    """Without transitions, which that loader does not know."""
    GumihoModel.from_pretrained(DEMO_PAIR / "gumiho", transition_rank=0).save_pretrained(folder)


def of_family(family: str, folder: Path, tokenizer: Any = None, save_embedding: bool = True, **settings: Any) -> None:
    drafter = make_drafter(make_target(family, num_layers=3), **settings)
    drafter.tokenizer = tokenizer
    drafter.save_pretrained(folder, save_embedding=save_embedding)


LLAMA = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 8}
SAVED: dict[str, Callable[[Path], None]] = {
    "fresh": lambda folder: GumihoModel(GumihoConfig(model=LLAMA)).save_pretrained(folder),
    "tokenizer": lambda folder: of_family("llama", folder, load_tokenizer()),
    "draft vocabulary": partial(of_family, "llama", draft_vocabulary=[1, 2, 3, 4]),
    "no embedding": partial(of_family, "llama", save_embedding=False),
    "trained": of_trainer,
    "merged": merged,
    "demo pair": demo_pair,
    **{family: partial(of_family, family) for family in ("llama", "qwen3", "gemma3", "gpt_oss", "gpt2", "opt")},
}


@pytest.mark.parametrize("save", SAVED.values(), ids=SAVED)
def test_saved_drafters_are_read(save: Any, tmp_path: Path) -> None:
    save(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    for num_tokens in range(1, 8):
        drafter = VllmDrafter(tmp_path, num_tokens, NO_HEAD)
        # Nothing is dropped but the heads beyond the chain.
        assert drafter.dropped == {
            name for name in names if name.startswith("mlp.") and int(name.split(".")[1]) >= max(num_tokens - 2, 0)
        }


@pytest.mark.parametrize("folder", sorted((ROOT / "hub_configs").iterdir()), ids=lambda folder: folder.name)
def test_configs_for_the_released_drafters_are_read(folder: Path) -> None:
    with torch.device("meta"):
        drafter = GumihoModel(GumihoConfig.from_pretrained(folder))
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert read_names(shapes, read_config(folder), 7) == ({name: name for name in shapes}, set())


def test_the_reader_notices_what_the_loader_cannot_read(tmp_path: Path) -> None:
    target = make_target(num_layers=3)
    for overrides, message in (
        ({"num_residual_blocks": 4}, r"Nothing is read into \['mlp.0.5.linear.bias'"),
        ({"num_residual_blocks": 6}, "no weight 'mlp.0.6.linear"),
        ({"num_serial_tokens": 3}, "'mlp.0.0.linear.weight' has the shape"),
        ({"num_parallel_heads": 4}, r"Nothing is read into \['mlp.4"),
    ):
        GumihoModel.from_target(target, **overrides).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=message):
            VllmDrafter(tmp_path, 7, NO_HEAD)
    GumihoModel.from_target(target).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"token_map": torch.arange(4)}, tmp_path / "model.safetensors")
    assert VllmDrafter(tmp_path, 7, NO_HEAD).dropped == {"token_map"}
    config = json.loads((tmp_path / "config.json").read_text())
    # What stands at the top of a config goes before what its nested config says.
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 16}))
    with pytest.raises(ValueError, match=r"has the shape \(8, 32\) instead of \(8, 16\)"):
        VllmDrafter(tmp_path, 7, NO_HEAD)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 7])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "opt"])
def test_a_chain_holds_the_tokens_that_vllm_drafts(family: str, num_tokens: int, tmp_path: Path) -> None:
    target = make_target(family, vocab_size=64, num_layers=3)
    drafter = make_drafter(target, branching_factor=1, num_assistant_tokens=num_tokens)
    # So that a feature depends on the whole text.
    for parameter in (drafter.fc.weight, *(p for p in drafter.layers.parameters() if p.ndim == 2)):
        torch.nn.init.normal_(parameter, std=0.4)
    drafter.save_pretrained(tmp_path)
    read = VllmDrafter(tmp_path, num_tokens, output_head(target))
    with recorded_drafts() as drafts:
        target.generate(**make_prompts([9]), max_new_tokens=24, do_sample=False, assistant_model=drafter)
    # What the drafter has read by then is what vLLM drafts from.
    parts = [(committed.tokens[0], committed.target_states[0]) for committed, _ in drafts]
    texts = [tuple(map(torch.cat, zip(*parts[:number], strict=True))) for number in range(1, len(parts) + 1)]
    chains = [tree.tokens[0, 1:].tolist() for _, tree in drafts]
    assert all(tree.depths[0].tolist() == [*range(num_tokens + 1)] for _, tree in drafts)
    assert [read.draft(*text) for text in texts] == chains
    assert len({tuple(chain) for chain in chains}) > 1
    if num_tokens == drafter.config.max_draft_depth:
        # Where vLLM differs: the first input of the drafter is zero there.
        assert [read.draft(*text, zero_first=True) for text in texts] != chains
