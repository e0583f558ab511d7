"""Draft temperatures that come out of training: the most likely ones, and what becomes of them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from targets import make_drafter, make_target
from trainers import make_trainer, pack_pairs
from transformers import PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.model.decoding_settings import DraftingSettings


def make_rows(target: PreTrainedModel, packed: bool) -> list[dict[str, Any]]:
    """Returns greedy texts of the target with a token of somebody else's here and there, two in a row if packed."""
    generator = torch.Generator().manual_seed(0)
    texts = []
    for index in range(10):
        prompt = torch.randint(1, 8, (1, 3), generator=generator)
        ids = target.generate(prompt, max_new_tokens=17 + index % 3, do_sample=False, pad_token_id=0)[0]
        ids[8 + index % 5] = 1 + index % 7
        texts.append({"input_ids": ids.tolist(), "loss_mask": [int(place > 2) for place in range(len(ids))]})
    return pack_pairs(texts) if packed else texts


def drafted_log_probs(
    target: PreTrainedModel, drafter: GumihoModel, rows: list[dict[str, Any]], depth: int, vocabulary: list[int]
) -> list[tuple[torch.Tensor, int]]:
    """Returns the logits of each draft that decoding would make on the target's own path, and the target's choice."""
    found = []
    for row in rows:
        starts = [place for place, number in enumerate(row.get("position_ids", [0, 1])) if number == 0] or [0]
        ends = [*starts[1:], len(row["input_ids"])]
        for start, end in zip(starts, ends, strict=True):
            ids = torch.tensor([row["input_ids"][start:end]])
            states = target.model(ids).last_hidden_state
            choices = target.lm_head(states)[0].argmax(dim=-1).tolist()
            for root in range(1, ids.shape[1]):
                place = root + depth - 1  # the token before the one that is drafted
                if place >= ids.shape[1] or not row["loss_mask"][start + place]:
                    continue
                between = range(root, place)
                if any(choices[at] != ids[0, at + 1] or not row["loss_mask"][start + at] for at in between):
                    continue
                if choices[place] not in vocabulary:
                    continue
                feature = draft_feature(drafter, ids[:, : root + depth], states[:, :root], depth)
                found.append((target.lm_head(feature)[vocabulary], vocabulary.index(choices[place])))
    return found


def draft_feature(drafter: GumihoModel, ids: torch.Tensor, states: torch.Tensor, depth: int) -> torch.Tensor:
    """Returns the feature that drafts a token `depth` after the root, the newest token that there is a state for."""
    fused, num_roots = [], states.shape[1]
    for step in range(min(depth, drafter.config.num_serial_tokens)):
        feature = drafter(ids[:, 1 : num_roots + 1 + step], states).serial_features[:, -1:]
        states = torch.cat((states, feature), dim=1)
        if depth > step + 1:
            fused.append(drafter.fuse(ids[:, num_roots + 1 + step : num_roots + 2 + step], feature))
    if depth <= drafter.config.num_serial_tokens:
        return feature[0, 0]
    return drafter.mlp(torch.cat(fused, dim=-1))[0, depth - 1 - drafter.config.num_serial_tokens, 0]


@torch.no_grad()
@pytest.mark.parametrize(("packed", "vocabulary_size"), [(False, None), (True, None), (False, 5)])
def test_temperatures_are_the_most_likely_ones(tmp_path: Path, packed: bool, vocabulary_size: int | None) -> None:
    target = make_target()
    rows = make_rows(target, packed)
    # Its logits are far too large, as those of a head that is too sure.
    drafter = make_drafter(target)
    settings = {"per_device_eval_batch_size": 4, "draft_vocabulary_size": vocabulary_size}
    trainer = make_trainer(target, tmp_path, drafter, train_dataset=rows, eval_dataset=rows, **settings)
    temperatures = trainer.calibrate()
    assert drafter.generation_config.draft_temperature == temperatures
    vocabulary = list(drafter.generation_config.draft_vocabulary or range(8))
    grid = torch.linspace(math.log(0.1), math.log(3.0), 400, dtype=torch.float64).exp()
    for depth in range(1, 6):
        drafts = drafted_log_probs(target, drafter, rows, depth, vocabulary)
        assert len(drafts) > 10
        logits, choices = torch.stack([logits for logits, _ in drafts]), torch.tensor([choice for _, choice in drafts])
        losses = torch.stack([torch.nn.functional.cross_entropy(logits / number, choices) for number in grid])
        assert temperatures[depth - 1] == pytest.approx(float(grid[losses.argmin()]), rel=0.02)


def test_temperatures_are_saved_with_the_drafter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = make_target()
    rows = make_rows(target, packed=False)
    drafter = GumihoModel.from_target(target)
    trainer = make_trainer(target, tmp_path, drafter, train_dataset=rows, eval_dataset=rows)
    for change in (trainer.train, trainer.calibrate):
        drafter.generation_config.break_even = 1.5
        caplog.clear()
        change()
        # It was measured with other weights and trees.
        assert drafter.generation_config.break_even is None
        assert caplog.text.count("`break_even`, which was measured before") == 1
    temperatures = drafter.generation_config.draft_temperature
    trainer.save_model()
    loaded = GumihoModel.from_pretrained(tmp_path)
    settings = DraftingSettings.from_generation_config(loaded.generation_config, loaded.config, None)
    assert settings.temperatures == tuple(temperatures)
    assert len(temperatures) == 7


def test_without_held_out_texts_there_is_nothing_to_fit_on(tmp_path: Path) -> None:
    target = make_target()
    rows = make_rows(target, packed=False)
    drafter = GumihoModel.from_target(target)
    trainer = make_trainer(target, tmp_path, drafter, train_dataset=rows, eval_dataset=None)
    with pytest.raises(ValueError, match=r"not trained on\. Give a `dataset`"):
        trainer.calibrate()
    for unfit in ([], Dataset.from_list(rows).to_iterable_dataset(), {"a": rows, "b": rows}):
        with pytest.raises(ValueError, match=r"Give a `dataset` that has rows, one of several"):
            trainer.calibrate(unfit)
    assert trainer.calibrate([row | {"loss_mask": [0] * len(row["loss_mask"])} for row in rows]) is None
    assert drafter.generation_config.draft_temperature is None
