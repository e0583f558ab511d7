"""vLLM's model runner V2 drafts what V1 does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm_engine import DEMO_DRAFTER, DEMO_TARGET
from vllm_pairs import FIELDS, make_gumiho, make_transitions_felt, transformers_chains, write_target

from transformers_gumiho import GumihoModel
from transformers_gumiho.vllm.chain import ChainParts
from transformers_gumiho.vllm.speculator import GumihoSpeculator


PROGRAM = Path(__file__).parents[1] / "helpers" / "vllm_interpreted.py"


def run(target: Path, drafter: Path, num_tokens: int, **settings: Any) -> dict[str, Any]:
    # Triton decides when it is imported whether it interprets.
    command = [sys.executable, PROGRAM, target, drafter, str(num_tokens), json.dumps(settings)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def test_texts_and_chains_are_those_of_transformers() -> None:
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    gumiho = GumihoModel.from_pretrained(DEMO_DRAFTER, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(DEMO_TARGET)("def __init__(self, ", return_tensors="pt").input_ids
    text = target.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=None)[0, prompt.shape[1] :]
    (drafted,) = transformers_chains(target, gumiho, prompt.tolist(), 7, 16)
    found = run(DEMO_TARGET, DEMO_DRAFTER, 7, prompts=prompt.tolist(), max_tokens=16)
    assert found["class"] == "GumihoSpeculator"
    assert found["texts"] == [text.tolist()]
    assert [chains[0] for chains in found["steps"]][: len(drafted)] == drafted


def test_chains_with_transitions_from_several_layers(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", LlamaConfig(**FIELDS, vocab_size=64))
    gumiho = make_gumiho(target, transition_rank=4, target_layer_ids=[0, 1])
    make_transitions_felt(gumiho)
    gumiho.save_pretrained(tmp_path / "gumiho")
    (drafted,) = transformers_chains(target, gumiho, [[1, 2, 3, 4, 5]], 5, 8)
    settings = {"speculation": {"method": "eagle3"}, "engine": {"skip_tokenizer_init": True}}
    found = run(tmp_path / "target", tmp_path / "gumiho", 5, prompts=[[1, 2, 3, 4, 5]], max_tokens=8, **settings)
    assert [chains[0] for chains in found["steps"]][: len(drafted)] == drafted
    for transition in gumiho.transition:
        transition.up.data.zero_()
    assert transformers_chains(target, gumiho, [[1, 2, 3, 4, 5]], 5, 8) != [drafted]


def test_how_much_is_drafted_follows_the_number_of_requests() -> None:
    target = AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32)
    tokenizer, lengths = AutoTokenizer.from_pretrained(DEMO_TARGET), [3, 6, 20]
    prompts = [tokenizer(text).input_ids for text in ("import os", "def __init__(self, ", "class A:\n    def ")]
    texts = []
    for ids, length in zip(prompts, lengths, strict=True):
        text = target.generate(torch.tensor([ids]), max_new_tokens=length, do_sample=False, eos_token_id=None)
        texts.append(text[0, len(ids) :].tolist())
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 1, 7], [2, 2, 3], [3, 8, 0]]}
    found = run(DEMO_TARGET, DEMO_DRAFTER, 7, prompts=prompts, max_tokens=lengths, speculation=schedule)
    assert found["texts"] == texts
    # V2 returns chains of full length, of which only the first are drafted.
    drafted = [(len(chains), {sum(token >= 0 for token in chain) for chain in chains}) for chains in found["steps"]]
    assert {num_requests for num_requests, _ in drafted} == {1, 2, 3}
    assert all(counts == {{1: 7, 2: 3, 3: 0}[num_requests]} for num_requests, counts in drafted)
    assert len([num_requests for num_requests, _ in drafted if num_requests == 1]) < 14


def draft(serial_features: list[torch.Tensor], model: Any, **fields: Any) -> list[list[int]]:
    """Returns the drafts of two of four requests: two tokens of these features, and two of the heads of `model`."""
    speculator = object.__new__(GumihoSpeculator)
    vars(speculator).update({
        "model": model, "dtype": torch.float32, "draft_logits": None, "temperature": torch.zeros(4), "seeds": None,
        "draft_tokens": torch.zeros(4, 4, dtype=torch.long), "idx_mapping": torch.arange(4),
        "current_draft_step": torch.tensor(0), "acceptance_estimator": None, "use_local_argmax_reduction": False,
        "_serial_features": torch.zeros(2, 4, 4), "_first_positions": torch.zeros(4, dtype=torch.long),
    } | fields)  # fmt: skip
    for step, features in enumerate(serial_features):
        speculator.current_draft_step.fill_(step)
        speculator.draft_tokens[:2, step] = speculator.sample_draft(
            features, torch.tensor([20, 30]) + step, speculator.idx_mapping[:2], speculator.temperature, None,
            speculator.current_draft_step, speculator.draft_logits,
        )  # fmt: skip
    speculator._draft_in_parallel(2, ChainParts(2, 2))
    return speculator.draft_tokens[:2].tolist()


def test_heads_draw_after_the_serial_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draw has the key of its own position, and its logits are kept in its own column."""
    drawn: list[tuple[list[int], int, list[float]]] = []

    def sample(self: Any, features: torch.Tensor, positions: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        step = int(args[3])
        drawn.append((positions.tolist(), step, features[:, 0].tolist()))
        return torch.full((len(features),), 10 + step)

    monkeypatch.setattr(EagleSpeculator, "sample_draft", sample)
    read: list[torch.Tensor] = []

    def draft_in_parallel(tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        read.extend((tokens.clone(), features.clone()))
        return torch.arange(4.0).view(2, 2, 1).expand(2, 2, 4)

    def moved_features(head: int, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return features + 100 * head + tokens[:, None]

    model = SimpleNamespace(draft_in_parallel=draft_in_parallel, moved_features=moved_features, drafting_head=None)
    found = draft([torch.full((2, 4), 5.0), torch.full((2, 4), 6.0)], model, draft_logits=torch.zeros(4, 4, 8))
    assert [(positions, step) for positions, step, _ in drawn] == [([20 + i, 30 + i], i) for i in range(4)]
    # Each moved by the token above.
    assert [features for *_, features in drawn[2:]] == [[11.0, 13.0], [113.0, 115.0]]
    assert read[0].tolist() == [[10, 11], [10, 11]]
    assert read[1][:, :, 0].tolist() == [[5.0, 6.0], [5.0, 6.0]]
    assert found == [[10, 11, 12, 13]] * 2


def test_the_acceptance_of_every_token_is_estimated() -> None:
    """Adaptive verification needs this. vLLM refuses it on a CPU, so its own `sample_draft` is called directly."""
    seen: list[tuple[int, list[list[float]]]] = []

    def predict(logits: torch.Tensor, idx_mapping: torch.Tensor, step: torch.Tensor, *others: Any) -> None:
        seen.append((int(step), logits.tolist()))

    model = SimpleNamespace(
        draft_in_parallel=lambda tokens, features: torch.eye(4)[None, 2:].repeat(2, 1, 1),
        moved_features=lambda head, features, tokens: features, compute_logits=lambda features: 3 * features,
        # With a draft vocabulary, the best tokens are found without the logits of the others.
        drafting_head=object(),
    )  # fmt: skip
    estimator = {"acceptance_estimator": SimpleNamespace(predict=predict)}
    estimator["draft_token_confidence_probs"] = torch.zeros(4, 4)
    found = draft([torch.eye(4)[step].repeat(2, 1) for step in range(2)], model, **estimator)
    assert seen == [(step, [(3 * torch.eye(4)[step]).tolist()] * 2) for step in range(4)]
    assert found == [[0, 1, 2, 3]] * 2
