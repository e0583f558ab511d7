"""The MTP layer of a target is trained further, alone or under parallel heads."""

from pathlib import Path

import pytest
import torch
from mtp import MtpTarget, make_mtp_target
from targets import equals_plain, make_prompts
from trainers import make_rows, trained

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
