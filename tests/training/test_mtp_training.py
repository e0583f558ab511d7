"""The MTP layer of a target is trained further, alone or under parallel heads."""

from pathlib import Path

import pytest
import torch
from commands import gumiho
from mtp import MtpTarget, make_mtp_target
from safetensors.torch import load_file
from targets import equals_plain, make_prompts
from trainers import make_rows, trained
from training_data import make_tokenizer, write_jsonl

from transformers_gumiho import GumihoModel
from transformers_gumiho.training.unrolling import unroll_serial_head


@pytest.fixture(scope="module", params=["glm4_moe", "mimo_v2_flash"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MtpTarget:
    return make_mtp_target(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("part", ["serial", "parallel"])
def test_one_part_is_trained_and_the_rest_keeps_every_bit(part: str, target: MtpTarget, tmp_path: Path) -> None:
    fields = {"num_serial_tokens": 3} if part == "serial" else {"num_serial_tokens": 2, "num_parallel_heads": 2}
    drafter = GumihoModel.from_pretrained(target.folder, dtype=torch.float32, **fields)
    drafter.share_embedding(target.model)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    rows = make_rows(12, length=18)
    trained(
        target.model, tmp_path, drafter, train_only=part, unroll_serial_head=True, max_steps=3, train_dataset=rows,
        eval_dataset=rows[:2], learning_rate=1e-3,
    )  # fmt: skip
    changed = {name for name, tensor in drafter.state_dict().items() if not tensor.equal(before[name])}
    heads = {name for name in before if name.startswith(("mlp.", "transition."))}
    assert changed
    assert changed <= (heads if part == "parallel" else before.keys() - heads)
    drafter.save_pretrained(tmp_path / "saved")
    saved = GumihoModel.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert all(tensor.equal(saved.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    equals_plain(target.model, saved, **make_prompts((6,), 3, 24), max_new_tokens=8)


def test_a_text_longer_than_the_window_is_unrolled_as_it_is_drafted(target: MtpTarget) -> None:
    """Each later token of the unrolled text is what the oracle computes for it."""
    drafter = GumihoModel.from_pretrained(target.folder, dtype=torch.float32, num_serial_tokens=3)
    drafter.share_embedding(target.model)
    ids = make_prompts((12,), 3, 24)["input_ids"]
    with torch.no_grad():
        states = target.read(ids[0].tolist())[None]
        output = drafter(ids[:, 1:], states[:, :-1], unroll=unroll_serial_head)
        head = target.model.get_output_embeddings()
        for step, features in enumerate(output.unrolled_features, start=1):
            text = ids[0].tolist()
            for place in (7, 8):
                wanted = target.logits(text[: place + 2], text[place + 2 : place + 2 + step])
                torch.testing.assert_close(head(features[0, place]), wanted, atol=1e-3, rtol=1e-3)


def test_the_command_trains_the_layer_of_the_targets_own_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer()
    target = make_mtp_target("glm4_moe", tmp_path / "target", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(target.folder)
    roles = {"user": "Sum up {}.", "assistant": "def sum_{}(): return {}"}
    rows = [
        {"messages": [{"role": role, "content": text.format(number, number)} for role, text in roles.items()]}
        for number in range(12)
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    gumiho(
        "train", "--target", target.folder, "--drafter", "mtp", "--train_only", "serial", "--unroll_serial_head",
        "true", "--data", data, "--regenerate", "false", "--cache_features", "false", "--stages", "train", "--use_cpu",
        "--max_steps", 2, "--save_steps", 1, "--num_eval_rows", 2, "--output_dir", tmp_path / "layer",
    )  # fmt: skip
    # The best drafter was read from a checkpoint.
    assert "missing keys" not in caplog.text
    before = GumihoModel.from_pretrained(target.folder, dtype=torch.float32)
    (checkpoint,) = tmp_path.rglob("checkpoint-2/model.safetensors")
    assert not load_file(checkpoint)["fc.weight"].equal(before.fc.weight)
    after = GumihoModel.from_pretrained(tmp_path / "layer", dtype=torch.float32)
    assert after.config.is_mtp
    equals_plain(target.model, after, **make_prompts((6,), 3, 24), max_new_tokens=8)
