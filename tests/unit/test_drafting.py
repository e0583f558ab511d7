"""A drafted tree is what the architecture says, computed path by path with the model's plain forward pass."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_trees import paths_of
from drafting_oracle import make_generator, scores_of_paths, states_of
from targets import make_drafter, make_pair, make_prompts, make_target
from tiny_configs import small_config
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from transformers_gumiho import DraftingSettings, GumihoModel
from transformers_gumiho.generation.drafting.drafter import GumihoDrafter
from transformers_gumiho.generation.tree.draft_tree import DraftTree
from transformers_gumiho.generation.verification.session import CommittedTokens
from transformers_gumiho.generation.verification.target_states import output_head


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def make_two_heads(target: PreTrainedModel, **fields: Any) -> GumihoModel:
    """Returns a drafter of two random parallel heads with these fields of its config."""
    torch.manual_seed(0)
    drafter = GumihoModel.from_target(target, num_parallel_heads=2, **fields).eval()
    for module in (drafter.mlp, drafter.transition or torch.nn.Module()):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return drafter


def committed(target: PreTrainedModel, ids: torch.Tensor, start: int = 1, end: int | None = None) -> CommittedTokens:
    """Returns the tokens `ids` `(B, T)` from `start` to `end`, with the states before them."""
    tokens = ids[:, start:end]
    places = slice(start - 1, start - 1 + tokens.shape[1])
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    lengths = [tokens.shape[1]] * len(ids)
    return CommittedTokens(tokens, states_of(target, ids)[:, places], positions[:, places], lengths)


def check_scores(
    target: PreTrainedModel, drafter: GumihoModel, ids: torch.Tensor, tree: DraftTree, *noise: Any
) -> None:
    """The paths are the best of all recombinations, when every serial token is kept."""
    scores: dict[tuple[int, ...], float] = {}
    for length in range(1, drafter.generation_config.tree_depth + 1):
        paths = [*itertools.product(range(target.config.vocab_size), repeat=length)]
        found = scores_of_paths(target, drafter, ids, torch.tensor(paths), *noise)
        scores |= dict(zip(paths, found.tolist(), strict=True))
    expected = sorted(scores.values(), reverse=True)[: tree.tokens.shape[1] - 1]
    torch.testing.assert_close([scores[path] for path in paths_of(tree, 0)], expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(tree.scores[0].tolist(), [0.0, *expected], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("transition_rank", [0, 3])
@pytest.mark.parametrize("draft_temperature", [1.3, [0.6, 2.0, 0.8, 1.5, 9.0], [1.5, 0.7, 1.1]], ids=str)
@pytest.mark.parametrize(("num_serial_tokens", "tree_depth"), [(1, 3), (2, 2), (2, 4), (3, 4)])
def test_tree_holds_the_best_paths_of_all_recombinations(
    num_serial_tokens: int, tree_depth: int, draft_temperature: float | list[float], transition_rank: int
) -> None:
    target = make_target(vocab_size=4)
    drafter = make_two_heads(target, num_serial_tokens=num_serial_tokens, transition_rank=transition_rank)
    # With every token kept at each serial step, all serial prefixes are there to be recombined with.
    drafter.generation_config.update(
        tree_depth=tree_depth, branching_factor=4**num_serial_tokens, num_assistant_tokens=200,
        draft_temperature=draft_temperature,
    )  # fmt: skip
    # Two rounds, the second on top of a cache, with tokens that were committed in between.
    for length in (4, 7):
        ids = make_prompts([length], seed=length)["input_ids"] % 4
        generator = make_generator(target, drafter, 1)
        generator.draft_tree(committed(target, ids, end=length - 2))
        tree = generator.draft_tree(committed(target, ids, start=length - 2))
        check_scores(target, drafter, ids, tree)


@pytest.mark.parametrize("transition_rank", [0, 3])
def test_paths_are_scored_under_noise_whatever_the_order_of_the_draft_vocabulary(transition_rank: int) -> None:
    target, ids = make_target(vocab_size=4), make_prompts([6], seed=6)["input_ids"] % 4
    drafter = make_two_heads(target, transition_rank=transition_rank)
    drafter.generation_config.update(
        tree_depth=4, branching_factor=16, num_assistant_tokens=60, draft_temperature=[0.6, 2.0, 0.8]
    )
    noise = -(-torch.rand(4, 4).log()).log()
    generator = make_generator(target, drafter, 1, noise[None], 0.7, torch.tensor([2, 0, 3, 1]))
    tree = generator.draft_tree(committed(target, ids))
    check_scores(target, drafter, ids, tree, noise, 0.7)


def test_rows_of_different_lengths_draft_what_they_draft_alone() -> None:
    target, drafter = make_pair(num_assistant_tokens=40)
    lengths = [3, 8, 5]
    batch = make_prompts(lengths)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    states = target.model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    generator = make_generator(target, drafter, len(lengths))
    generator.draft_tree(CommittedTokens(ids[:, 1:], states[:, :-1], positions[:, :-1], [7, 7, 7], mask[:, :-1]))
    # The rows advance by 1, 3 and 2 tokens.
    new = torch.tensor([[4, 0, 0], [5, 6, 7], [1, 2, 0]])
    accepted_lengths = [1, 3, 2]
    new_states = torch.randn(3, 3, target.config.hidden_size, dtype=torch.float64)
    new_positions = positions[:, -1:] + torch.arange(3)
    tree = generator.draft_tree(CommittedTokens(new, new_states, new_positions, accepted_lengths))
    for row, (length, count) in enumerate(zip(lengths, accepted_lengths, strict=True)):
        alone = make_generator(target, drafter, 1)
        row_states, row_positions = states[row : row + 1, -length:], positions[row : row + 1, -length:]
        prompt = ids[row : row + 1, 1 - length :]
        alone.draft_tree(CommittedTokens(prompt, row_states[:, :-1], row_positions[:, :-1], [length - 1]))
        slices = (tensor[row : row + 1, :count] for tensor in (new, new_states, new_positions))
        expected = alone.draft_tree(CommittedTokens(*slices, [count]))
        assert torch.equal(tree.tokens[row], expected.tokens[0])
        assert torch.equal(tree.parents[row], expected.parents[0])


@pytest.mark.parametrize(
    "config",
    [
        small_config("granite", logits_scaling=8.0),
        small_config("cohere", logit_scale=0.0625),
        small_config("gemma2", final_logit_softcapping=2.0),
        small_config("llama"),
    ],
    ids=lambda config: config.model_type,
)
def test_drafts_are_scored_with_the_logits_of_the_target(config: PreTrainedConfig) -> None:
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config).eval()
    ids = make_prompts([6])["input_ids"]
    logits = output_head(target)(target.model(ids).last_hidden_state)
    torch.testing.assert_close(logits, target(ids).logits)


def test_branching_factor_one_drafts_a_chain_of_arg_maxes() -> None:
    target, drafter = make_pair(branching_factor=1)
    ids = make_prompts([6])["input_ids"]
    generator = make_generator(target, drafter, 1)
    outputs = SimpleNamespace(hidden_states=[states_of(target, ids)[:, :-1]])
    candidates, logits = generator.get_candidates(ids, model_outputs=outputs)
    tokens, states, path, fused = ids[:, 1:], states_of(target, ids)[:, :-1], [], []
    for _ in range(2):
        feature = drafter(tokens, states).serial_features[:, -1:]
        token = target.lm_head(feature).argmax(dim=-1)
        fused.append(drafter.fuse(token, feature))
        tokens, states = torch.cat((tokens, token), 1), torch.cat((states, feature), 1)
        path.append(int(token))
    path += target.lm_head(drafter.mlp(torch.cat(fused, dim=-1))[0, :, 0]).argmax(dim=-1).tolist()
    assert logits is None
    assert candidates.tolist() == [ids[0].tolist() + path]


def test_what_is_too_deep_for_the_tree_is_not_drafted(calls_of: Any) -> None:
    target, chains = make_target(), []
    ids = make_prompts([6])["input_ids"]
    scored = calls_of(GumihoDrafter, "score")
    for num_assistant_tokens in (1, 2, 3, 7):
        drafter = make_drafter(target, num_assistant_tokens=num_assistant_tokens, branching_factor=1)
        generator = make_generator(target, drafter, 1)
        scored.clear()
        outputs = SimpleNamespace(hidden_states=[states_of(target, ids)[:, :-1]])
        chains.append(generator.get_candidates(ids, model_outputs=outputs)[0][0].tolist())
        assert sum(call.args[1].shape[:-1].numel() for call in scored) == num_assistant_tokens
        assert len(chains[-1]) == 6 + num_assistant_tokens
    assert all(chain == chains[-1][: len(chain)] for chain in chains)


def test_without_full_tree_attention_only_the_best_nodes_of_a_depth_are_extended() -> None:
    target, drafter = make_pair(full_tree_attention=False, branching_factor=3)
    ids = make_prompts([6])["input_ids"]
    tree = make_generator(target, drafter, 1).draft_tree(committed(target, ids))
    parents, depths = tree.parents[0].tolist(), tree.depths[0].tolist()
    for depth in range(1, 7):
        extended = {parents[node] for node in range(1, len(parents)) if depths[node] == depth + 1}
        at_depth = [node for node in range(1, len(parents)) if depths[node] == depth]
        # Nodes are in the order of their scores.
        assert extended <= set(at_depth[:3])
        assert all(parents.count(node) <= 3 for node in at_depth)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_assistant_tokens": 0}, "`num_assistant_tokens` must be an integer of at least 1, got 0"),
        ({"branching_factor": -3}, "`branching_factor` must be an integer of at least 1, got -3"),
        ({"branching_factor": 2.5}, "`branching_factor` must be an integer of at least 1, got 2.5"),
        ({"tree_depth": 8}, "`tree_depth` is 8, but this drafter drafts at most 7 tokens: 2 serial ones and 5"),
        ({"full_tree_attention": "yes"}, "`full_tree_attention` must be True or False, got 'yes'"),
        ({"draft_temperature": 0.0}, "`draft_temperature` must be a positive number, a list .* or None, got 0.0"),
        ({"draft_temperature": []}, r"one for each depth, from depth 1 down\) or None, got \[\]"),
        ({"draft_temperature": [0.5, -1]}, r"or None, got \[0.5, -1\]"),
        ({"draft_temperature": [0.5, True]}, r"or None, got \[0.5, True\]"),
        ({"draft_temperature": ["0.5"]}, r"or None, got \['0.5'\]"),
        ({"draft_temperature": float("nan")}, "or None, got nan"),
    ],
)
def test_settings_out_of_range_are_refused_before_the_target_runs(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = make_pair(**settings)
    monkeypatch.setattr(target, "_prefill", lambda *args, **kwargs: pytest.fail("the target ran"))
    with pytest.raises(ValueError, match=message):
        target.generate(**make_prompts([4]), max_new_tokens=4, assistant_model=drafter)


def test_draft_temperature_defaults_to_two_thirds() -> None:
    drafter = make_drafter(make_target())
    for sampling_temperature in (0.8, None):
        settings = DraftingSettings.from_generation_config(
            drafter.generation_config, drafter.config, sampling_temperature
        )
        assert (settings.draft_temperature, settings.sampling_temperature) == (2 / 3, sampling_temperature)
