"""A drafter that scores some tokens only: what is drafted, what is generated, and how it comes with a checkpoint."""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from checkpoints import VOCAB_SIZE as CHECKPOINT_VOCAB_SIZE
from checkpoints import write_checkpoint
from draft_trees import Trees
from peft import LoraConfig, get_peft_model
from targets import VOCAB_SIZE, equals_plain, make_drafter, make_pair, make_prompts, make_target
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation.observers import observing
from transformers_gumiho.generation.verification.target_states import output_head


SUBSET = [6, 1, 5, 2]
PERMUTED = [3, 7, 0, 5, 1, 6, 2, 4]


def trees_of(target: PreTrainedModel, drafter: GumihoModel) -> list[tuple[list, list]]:
    """Returns the tokens and parents of the trees that a generation drafts."""
    with observing(seen := Trees()):
        target.generate(**make_prompts([5, 5]), max_new_tokens=20, do_sample=False, assistant_model=drafter)
    return [(tree.tokens.tolist(), tree.parents.tolist()) for tree in seen.trees]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


# Gemma ties its head to its embedding, and Gemma 2 caps its logits. OPT projects its states.
@pytest.mark.parametrize(
    ("family", "vocabulary"),
    [("llama", SUBSET), ("llama", [5]), ("gemma2", PERMUTED), ("gemma3", SUBSET), ("opt", [5]), ("opt", PERMUTED)],
)
def test_text_equals_plain_and_drafts_are_of_the_vocabulary(family: str, vocabulary: list[int]) -> None:
    target, drafter = make_pair(family, num_assistant_tokens=30, draft_vocabulary=vocabulary)
    drafted: set[int] = set()
    for lengths, settings in (
        ([5], {}),
        # In float64, padding makes Gemma 2 itself overflow.
        ([5, 5] if family == "gemma2" else [5, 2, 4], {}),
        ([5], {"do_sample": True, "temperature": 0.9, "top_k": 5}),
    ):
        with observing(seen := Trees()):
            output = equals_plain(target, drafter, seed=1, lengths=lengths, **settings)
        drafted |= {token for tree in seen.trees for token in tree.tokens[:, 1:].flatten().tolist()}
    assert drafted == set(vocabulary)
    if len(vocabulary) < VOCAB_SIZE:
        # The target may say what cannot be drafted.
        assert not set(output.sequences[0].tolist()) <= set(vocabulary)


@pytest.mark.parametrize("full_tree_attention", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_whole_vocabulary_in_any_order_drafts_the_same_trees(family: str, full_tree_attention: bool) -> None:
    target, drafter = make_pair(family, branching_factor=3, full_tree_attention=full_tree_attention)
    whole = trees_of(target, drafter)
    for vocabulary in (PERMUTED, tuple(PERMUTED)):
        drafter.generation_config.draft_vocabulary = vocabulary
        assert trees_of(target, drafter) == whole


class Doubled(nn.Linear):
    """Keeps the parameters of a linear layer, but computes something else."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(features)


class Packed(torch.Tensor):
    """A weight that is not what a matrix product with its memory would give, as those of quantized layers are."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.index_select:
            raise NotImplementedError("rows cannot be picked from packed weights")
        result = super().__torch_function__(function, types, args, kwargs or {})
        return 3 * result.as_subclass(torch.Tensor) if function is nn.functional.linear else result


def with_bias_and_scale(target: PreTrainedModel) -> None:
    target.lm_head.bias = nn.Parameter(torch.randn(VOCAB_SIZE, dtype=torch.float64))
    target.config.logits_scaling = 8.0


def with_a_low_cap(target: PreTrainedModel) -> None:
    target.config.final_logit_softcapping = 0.5


def quantized(target: PreTrainedModel) -> None:
    target.lm_head.weight = nn.Parameter(target.lm_head.weight.detach().as_subclass(Packed), requires_grad=False)


def of_another_class(target: PreTrainedModel) -> None:
    head = Doubled(32, VOCAB_SIZE, bias=False, dtype=torch.float64)
    head.weight = target.lm_head.weight
    target.lm_head = head


def with_another_forward(target: PreTrainedModel) -> None:
    plain = target.lm_head.forward
    target.lm_head.forward = lambda features: -plain(features)


Change = Callable[[PreTrainedModel], Any]
PLAIN: dict[str, Change | None] = {
    "llama": None, "gemma2": with_a_low_cap, "gemma3": None, "gpt_neox": None, "mistral": with_bias_and_scale,
}  # fmt: skip
ADAPTER = LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
WRAPPED: dict[str, Change] = {
    "another class": of_another_class,
    "quantized": quantized,
    "adapter": lambda target: get_peft_model(target, ADAPTER).eval(),
    "hook": lambda target: target.lm_head.register_forward_hook(lambda module, args, logits: logits.flip(-1)),
    "another forward": with_another_forward,
    "offloaded": lambda target: cpu_offload(target, execution_device=torch.device("cpu")),
}


@pytest.mark.parametrize(("family", "change"), PLAIN.items())
def test_plain_head_is_cut_to_the_rows_of_the_vocabulary(
    family: str, change: Change | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(family)
    if change is not None:
        change(target)
    features = torch.randn(2, 3, 32, dtype=torch.float64)
    expected = output_head(target)(features)[..., SUBSET]
    monkeypatch.setattr(nn.Linear, "forward", lambda *args: pytest.fail("the whole head ran"))
    head = output_head(target, torch.tensor(SUBSET))
    torch.testing.assert_close(head(features), expected)
    assert head(features[:, :0]).shape == (2, 0, len(SUBSET))  # of a batch in which no position counts


@pytest.mark.parametrize("change", list(WRAPPED))
def test_head_that_is_more_than_a_matrix_runs_as_it_is(change: str) -> None:
    target = make_target("gemma2")
    features = torch.randn(2, 3, 32, dtype=torch.float64)
    unchanged = output_head(target)(features)
    drafter = make_drafter(target, num_assistant_tokens=30, draft_vocabulary=PERMUTED)
    WRAPPED[change](target)
    logits = output_head(target)(features)
    assert torch.equal(logits, unchanged) == (change == "offloaded")
    torch.testing.assert_close(output_head(target, torch.tensor(SUBSET))(features), logits[..., SUBSET])
    permuted = trees_of(target, drafter)
    drafter.generation_config.draft_vocabulary = None
    assert permuted == trees_of(target, drafter)


def test_cut_head_follows_the_weights_of_the_target() -> None:
    target, drafter = make_pair(draft_vocabulary=SUBSET)
    seen = [trees_of(target, drafter)]
    head = target.lm_head.weight
    for change in (
        lambda: head.copy_(head.roll(1, dims=0)),
        lambda: target.load_state_dict({"lm_head.weight": head.flip(0)}, strict=False),
        lambda: target.set_output_embeddings(copy.deepcopy(target.lm_head).requires_grad_(False)),
        lambda: target.lm_head.weight.copy_(torch.randn_like(head)),
    ):
        change()
        now = trees_of(target, drafter)
        assert now == trees_of(copy.deepcopy(target), drafter)
        seen.append(now)
    assert [before == after for before, after in itertools.pairwise(seen)] == [False, False, True, False]


@pytest.mark.parametrize(
    ("vocabulary", "found"),
    [
        ([], r"it is empty"),
        ([1, 2, 1], r"it holds 1 more than once"),
        ([1, 8], r"it holds 8"),
        ([-1, 3], r"it holds -1"),
        ([1, 2.0], r"it holds 2\.0"),
        ([1, True], r"it holds True"),
        ("all", r"it is of type str"),
        (torch.tensor([1, 2]), r"it is of type Tensor"),
    ],
    ids=str,
)
def test_vocabularies_out_of_range_are_refused(vocabulary: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = make_pair(draft_vocabulary=vocabulary)
    monkeypatch.setattr(target, "_prefill", lambda *args, **kwargs: pytest.fail("the target ran"))
    needed = r"`draft_vocabulary` must be None or a list of distinct token ids from 0 to 7, but "
    with pytest.raises(ValueError, match=f"^{needed}{found}. Set it in the drafter's `generation_config`.$"):
        target.generate(**make_prompts([4]), max_new_tokens=4, assistant_model=drafter)


IDS = [40, 2, 3, 17, 49]
MAPS: dict[str, dict[str, Any]] = {
    "token_map": {"token_map": torch.tensor(IDS)},
    "token_map32": {"model.token_map": torch.tensor(IDS, dtype=torch.int32)},
    "d2t": {"d2t": torch.tensor(IDS) - torch.arange(5)},
    "d2t_and_t2d": {
        "model.model.d2t": torch.tensor(IDS) - torch.arange(5),
        "t2d": torch.zeros(CHECKPOINT_VOCAB_SIZE, dtype=torch.bool),
    },
}
FORMATS = ["bin", "bin_legacy", "bin_sharded", "safetensors", "safetensors_sharded"]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", list(MAPS))
def test_released_vocabulary_becomes_a_setting(tmp_path: Path, name: str, form: str) -> None:
    weights = write_checkpoint(tmp_path, MAPS[name], form)
    model, info = GumihoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert model.generation_config.draft_vocabulary == IDS
    assert not info["unexpected_keys"]
    model.save_pretrained(tmp_path / "saved")
    loaded = GumihoModel.from_pretrained(tmp_path / "saved")
    assert loaded.generation_config.draft_vocabulary == IDS
    # Only as a setting: no tensor is left.
    assert loaded.state_dict().keys() == weights.keys() - MAPS[name].keys()


def test_vocabulary_is_read_from_the_file_that_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "sub"
    folder.mkdir()
    write_checkpoint(folder, {"token_map": [1, 2]})  # a list is as good as a tensor
    write_checkpoint(folder, {"token_map": torch.tensor([3, 4])}, "safetensors")
    write_checkpoint(folder, {"token_map": torch.tensor([5, 6])}, "safetensors", ".fp16")
    for options, expected in (({}, [3, 4]), ({"use_safetensors": False}, [1, 2]), ({"variant": "fp16"}, [5, 6])):
        model = GumihoModel.from_pretrained(tmp_path, subfolder="sub", **options)
        assert model.generation_config.draft_vocabulary == expected
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True) | {"token_map": torch.tensor([7])}
    model = GumihoModel.from_pretrained(None, config=model.config, state_dict=weights)
    assert model.generation_config.draft_vocabulary == [7]


def test_setting_of_the_checkpoint_comes_first(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, MAPS["d2t_and_t2d"])
    GenerationConfig(draft_vocabulary=[7, 8]).save_pretrained(tmp_path)
    assert GumihoModel.from_pretrained(tmp_path).generation_config.draft_vocabulary == [7, 8]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"token_map": torch.tensor([1, 50])},
            r"`token_map` must name distinct token ids from 0 to 49, but it holds 50",
        ),
        ({"model.d2t": torch.tensor([1, 0])}, r"`d2t` must name distinct token ids .* it holds 1 more than once"),
        ({"token_map": torch.tensor([], dtype=torch.long)}, r"`token_map` must name distinct .* it is empty"),
        ({"token_map": torch.ones(3)}, r"`token_map` must be 1-D and of integers, got torch\.float32 of shape \(3,\)"),
        ({"d2t": torch.ones(3, 1).long()}, r"`d2t` must be 1-D and of integers, got torch\.int64 of shape \(3, 1\)"),
        (MAPS["token_map"] | MAPS["d2t"], r"draft vocabulary more than once: d2t, token_map\. Keep one"),
        ({"t2d": torch.ones(50).bool()}, r"unexpected: t2d"),
        (MAPS["d2t"] | {"norm.weight": torch.ones(32)}, r"unexpected: norm\.weight$"),
    ],
)
def test_released_vocabularies_that_make_no_sense_are_refused(
    tmp_path: Path, extra: dict[str, Any], message: str
) -> None:
    write_checkpoint(tmp_path, extra)
    with pytest.raises(ValueError, match=message):
        GumihoModel.from_pretrained(tmp_path)
