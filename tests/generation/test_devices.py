"""Generation and training on pretend accelerators: no devices are mixed, and the host waits no more than it has to."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState, dispatch_model
from block import make_block_model
from chains import make_chain_drafter, make_chain_target
from pretend_device import PretendMachine, pretending
from targets import make_drafter, make_pair, make_prompts, make_target
from trained_pair import load_drafter, load_language_model, load_tokenizer
from trainers import losses_of, make_args, make_rows
from transformers import PreTrainedModel, TrainingArguments

from transformers_gumiho import GumihoModel
from transformers_gumiho.generation import attach, token_choice
from transformers_gumiho.generation.observers import GenerationObserver, observing
from transformers_gumiho.generation.tree import walk
from transformers_gumiho.generation.tree.draft_tree import DraftTree
from transformers_gumiho.generation.verification.target_memory import memory_of
from transformers_gumiho.generation.verification.traits import drafter_device, input_device
from transformers_gumiho.tools.measuring.timing import accelerators_of
from transformers_gumiho.training import GumihoTrainer, Sampling
from transformers_gumiho.training.writing.local import draw


GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
STATIC = {"cache_implementation": "static", "disable_compile": True}
LOOKUP = {"prompt_lookup_num_tokens": 10}
PENALTY = {"repetition_penalty": 1.1}  # which looks at the prefix

SPLIT = {
    "model.embed_tokens": "cuda:0", "model.rotary_emb": "cuda:0", "model.layers.0": "cuda:0",
    "model.layers.1": "cuda:1", "model.norm": "cuda:1", "lm_head": "cuda:1",
}  # fmt: skip
# Where the target is, and where the drafter is.
PLACEMENTS: dict[str, tuple[str | dict[str, str], str]] = {
    "one device": ("cuda:0", "cuda:0"),
    "two devices": ("cuda:0", "cuda:1"),
    "drafter on the host": ("cuda:0", "cpu"),
    "target on the host": ("cpu", "cuda:0"),
    "split target": (SPLIT, "cuda:0"),
    "split target, drafter beside its head": (SPLIT, "cuda:1"),
}
# Settings of the drafter, lengths of the prompts, and how to generate.
WAYS: dict[str, tuple[dict[str, Any], list[int], dict[str, Any]]] = {
    "greedy": ({}, [5], GREEDY),
    "sampled": ({}, [5, 2, 4], SAMPLED),
    "context": ({}, [9, 4], GREEDY | LOOKUP),
    "static": ({}, [5, 2], SAMPLED | STATIC),
    "layers, some tokens": ({"target_layer_ids": [0, 1], "draft_vocabulary": [6, 1, 5, 2]}, [5, 2], GREEDY),
    "transitions": ({"transition_rank": 3}, [5], SAMPLED),
}


def move(model: PreTrainedModel, place: str | dict[str, str]) -> str:
    """Moves a model; returns the device for its inputs."""
    if isinstance(place, str):
        model.to(place)
        return place
    dispatch_model(model, place, main_device=next(iter(place.values())))
    return next(iter(place.values()))


def generate(
    target: PreTrainedModel, drafter: GumihoModel, inputs: dict[str, torch.Tensor], device: str, **kwargs: Any
) -> torch.Tensor:
    """Returns the sequences, on the CPU, of `inputs` moved to `device`."""
    torch.manual_seed(0)
    inputs = {name: value.to(device) for name, value in inputs.items()}
    sequences = target.generate(**inputs, assistant_model=drafter, **{"max_new_tokens": 12} | kwargs)
    assert sequences.device == torch.device(device)
    return sequences.cpu()


# Every way where target and drafter are on one device, on two, and on the host; the others where there are parts.
PLACED_WAYS = [
    *itertools.product(list(PLACEMENTS)[:3], WAYS),
    *itertools.product(["target on the host"], ["context", "transitions"]),
    *itertools.product(["split target"], ["greedy", "static", "sampled"]),
    *itertools.product(["split target, drafter beside its head"], ["sampled", "layers, some tokens"]),
]


@pytest.mark.parametrize(("placement", "way"), PLACED_WAYS)
def test_generation_mixes_no_devices(placement: str, way: str) -> None:
    settings, lengths, kwargs = WAYS[way]
    target, drafter = make_pair(num_assistant_tokens=20, **settings)
    expected = generate(target, drafter, make_prompts(lengths), "cpu", **kwargs)
    with pretending():
        device = move(target, PLACEMENTS[placement][0])
        drafter.to(PLACEMENTS[placement][1])
        assert torch.equal(generate(target, drafter, make_prompts(lengths), device, **kwargs), expected)


@pytest.mark.parametrize("placement", list(PLACEMENTS)[:3])
@pytest.mark.parametrize("kwargs", [SAMPLED, GREEDY | STATIC], ids=["sampled", "static"])
def test_block_drafters_mix_no_devices(kwargs: dict[str, Any], placement: str) -> None:
    target = make_target(num_layers=3)
    drafter = make_block_model(target)
    drafter.generation_config.draft_vocabulary = [6, 1, 5, 2]
    expected = generate(target, drafter, make_prompts([5, 2]), "cpu", **kwargs)
    with pretending():
        device = move(target, PLACEMENTS[placement][0])
        drafter.to(PLACEMENTS[placement][1])
        assert torch.equal(generate(target, drafter, make_prompts([5, 2]), device, **kwargs), expected)


@pytest.mark.parametrize("branching_factor", [1, 4])
def test_deterministic_algorithms(branching_factor: int) -> None:
    """PyTorch has none for some operations on an accelerator. Greedy decoding takes none of these."""
    target, drafter = make_pair(num_assistant_tokens=8, branching_factor=branching_factor, transition_rank=3)
    expected = generate(target, drafter, make_prompts([9]), "cpu", **GREEDY)
    torch.use_deterministic_algorithms(True)
    try:
        with pretending():
            target.to("cuda:0")
            drafter.to("cuda:0")
            for lookup in ({}, LOOKUP):
                assert torch.equal(
                    generate(target, drafter, make_prompts([9]), "cuda:0", **GREEDY, **lookup), expected
                )
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_drafter_is_placed_beside_the_head_of_a_split_target(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = make_pair()
    # Loading asks a real driver for its memory.
    monkeypatch.setattr(GumihoModel, "from_pretrained", lambda name, device_map, **kwargs: drafter.to(device_map))
    with pretending():
        move(target, SPLIT)
        devices = [torch.device("cuda:0"), torch.device("cuda:1")]
        assert [input_device(target), drafter_device(target)] == devices
        assert accelerators_of(target) == devices
        assert attach.named_drafter(target, "drafter").device == devices[1]
    assert accelerators_of(make_target()) == []


@pytest.mark.parametrize("placement", [place for place in PLACEMENTS.values() if isinstance(place[0], str)], ids=str)
@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "bloom"])
def test_recurrent_and_chain_targets_mix_no_devices(family: str, placement: tuple[str, str]) -> None:
    target = make_chain_target(family)
    drafter = make_chain_drafter(target)
    expected = generate(target, drafter, make_prompts([9, 4]), "cpu", **SAMPLED)
    with pretending():
        move(target, placement[0])
        drafter.to(placement[1])
        assert torch.equal(generate(target, drafter, make_prompts([9, 4]), placement[0], **SAMPLED), expected)


@pytest.mark.parametrize("kwargs", [GREEDY | LOOKUP, SAMPLED], ids=["context", "sampled"])
@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_devices_without_float64(family: str, kwargs: dict[str, Any]) -> None:
    target = (make_target if family == "llama" else make_chain_target)(family).float()
    drafter = (make_drafter if family == "llama" else make_chain_drafter)(target)
    # The noise of a batch's coming draws is not known there.
    prompts = make_prompts([9] if kwargs["do_sample"] else [9, 4])
    expected = generate(target, drafter, prompts, "cpu", **kwargs)
    memory_of(target).verdicts.clear()  # a target that verifies chains is tried on this device, too
    with pretending():
        target.to("mps")
        drafter.to("mps")
        assert torch.equal(generate(target, drafter, prompts, "mps", **kwargs), expected)


def test_synthesis_without_float64() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, -torch.inf]])
    with pretending():
        drawn = draw(logits.expand(2, -1).to("mps"), Sampling(1.0, 0.9), torch.tensor([0.1, 0.9]).to("mps"))
        assert sorted(drawn.tolist()) == [1, 2]


# A device without float64 asks more of the code than one with it, and transitions are trained beside all the rest.
@pytest.mark.parametrize(("device", "transition_rank"), [("cuda:0", 0), ("mps", 3)])
def test_training_mixes_no_devices(
    device: str, transition_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target().float()

    def train() -> list[float]:
        drafter = make_drafter(target, transition_rank=transition_rank).float()
        trainer = GumihoTrainer(drafter, make_args(tmp_path), target=target, train_dataset=make_rows())
        monkeypatch.setattr(trainer.accelerator.state, "device", trainer.args.device)
        trainer.train()
        return losses_of(trainer)

    expected = train()
    with pretending():
        monkeypatch.setattr(TrainingArguments, "device", torch.device(device))
        assert train() == expected
        assert target.device == torch.device(device)
    PartialState._reset_state()  # noqa: SLF001 (other tests train on the CPU)


class Cycles(GenerationObserver):
    """Counts how often the host has waited when each cycle ends, and the tokens of the longest path of each."""

    def __init__(self, machine: PretendMachine):
        self.machine = machine
        self.waits: list[int] = []
        self.num_tokens: list[int] = []

    def on_cycle(self, tree: DraftTree, path: walk.Path) -> None:
        self.waits.append(len(self.machine.waits))
        self.num_tokens.append(max(path.accepted_lengths))


DEMO_PROMPTS = ["def __init__(self, ", "import os\nimport sys\n\ndef main(", "class Reader:\n    def read("]


@pytest.fixture(scope="module")
def demo_pair() -> tuple[PreTrainedModel, GumihoModel, Any]:
    tokenizer = load_tokenizer()
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    drafter = load_drafter(num_assistant_tokens=63, branching_factor=14, break_even=1.0)
    return load_language_model(), drafter, tokenizer


@pytest.fixture
def waits_of_cycles(demo_pair: tuple[PreTrainedModel, GumihoModel, Any]) -> Callable[..., tuple[int, int, int]]:
    """Returns for a generation of the demo pair its cycles after warm-up, their tokens, and waits of the host."""
    target, drafter, tokenizer = demo_pair

    def count(num_rows: int, kwargs: dict[str, Any]) -> tuple[int, int, int]:
        inputs = dict(tokenizer(DEMO_PROMPTS[:num_rows], return_tensors="pt", padding=True))
        kwargs = {"draft_vocabulary": None} | kwargs
        drafter.generation_config.draft_vocabulary = kwargs.pop("draft_vocabulary")
        with pretending() as machine:
            target.to("cuda:0")
            drafter.to("cuda:0")
            with observing(cycles := Cycles(machine)):
                generate(target, drafter, inputs, "cuda:0", **kwargs | {"max_new_tokens": 48})
            target.to("cpu")
            drafter.to("cpu")
        # The last cycle is one without a draft for the next.
        first, last = 1, len(cycles.waits) - 2
        assert last - first >= 3
        num_waits = cycles.waits[last] - cycles.waits[first]
        return last - first, sum(cycles.num_tokens[first + 1 : last + 1]), num_waits

    return count


# Rows, how to generate, and the most waits of the host: in each cycle, and for each token of its longest path.
WAITS: dict[str, tuple[int, dict[str, Any], tuple[int, int]]] = {
    "greedy, 1 row": (1, GREEDY, (1, 0)),
    "greedy, 3 rows": (3, GREEDY, (1, 0)),
    "greedy, some tokens": (1, GREEDY | {"draft_vocabulary": [*range(2048)]}, (1, 0)),
    "sampled, 1 row": (1, SAMPLED, (1, 0)),
    "sampled, 3 rows": (3, SAMPLED, (1, 0)),
    "sampled token by token, 1 row": (1, SAMPLED | PENALTY, (0, 1)),
    "sampled, context, 1 row": (1, SAMPLED | LOOKUP, (1, 0)),
    "context, 1 row": (1, GREEDY | LOOKUP, (1, 0)),
    "context, 3 rows": (3, GREEDY | LOOKUP, (1, 0)),
    "static, 1 row": (1, GREEDY | STATIC, (1, 0)),
}


@pytest.mark.parametrize(("num_rows", "kwargs", "most"), WAITS.values(), ids=WAITS)
def test_waits_of_the_host(
    num_rows: int, kwargs: dict[str, Any], most: tuple[int, int], waits_of_cycles: Callable[..., tuple[int, int, int]]
) -> None:
    num_cycles, num_tokens, num_waits = waits_of_cycles(num_rows, kwargs)
    assert 0 < num_waits <= most[0] * num_cycles + most[1] * num_tokens


def test_waits_of_ragged_rows_whose_tokens_are_drawn_one_by_one(
    waits_of_cycles: Callable[..., tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_choice, "_AT_ONCE_DEVICES", ())
    _, num_tokens, num_waits = waits_of_cycles(3, SAMPLED)
    assert 0 < num_waits <= num_tokens
