"""Drafts and their scores, computed without caches."""

import torch
from transformers import PreTrainedModel

from transformers_gumiho import DraftingSettings, GumihoCandidateGenerator, GumihoModel
from transformers_gumiho.generation.verification.tree_cache import TreeCache


def make_generator(
    target: PreTrainedModel,
    drafter: GumihoModel,
    batch_size: int,
    noise: torch.Tensor | None = None,
    sampling_temperature: float | None = None,
    token_ids: torch.Tensor | None = None,
) -> GumihoCandidateGenerator:
    settings = DraftingSettings.from_generation_config(drafter.generation_config, drafter.config, sampling_temperature)
    cache = TreeCache(batch_size, 64)

    def head(features: torch.Tensor) -> torch.Tensor:
        logits = target.lm_head(features)
        return logits if token_ids is None else logits[..., token_ids]

    def peek_noise(num_draws: int, token_ids: torch.Tensor | None) -> torch.Tensor | None:
        return noise if noise is None or token_ids is None else noise.index_select(2, token_ids)

    return GumihoCandidateGenerator(drafter, head, settings, cache, peek_noise=peek_noise, token_ids=token_ids)


def states_of(target: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return target.model(ids).last_hidden_state


def score_of_path(
    target: PreTrainedModel,
    drafter: GumihoModel,
    ids: torch.Tensor,
    path: tuple[int, ...],
    noise: torch.Tensor | None = None,
    sampling_temperature: float = 1.0,
) -> float:
    """The summed log-probability of a path, from whole forward passes without any cache; noise is `(depth, V)`."""
    given = drafter.generation_config.draft_temperature
    # The last of a list goes on below.
    temperatures = given + given[-1:] * len(path) if isinstance(given, list) else [given] * len(path)
    tokens, states = ids[:, 1:], states_of(target, ids)[:, :-1]
    num_serial_tokens = drafter.config.num_serial_tokens
    score, fused = 0.0, []

    def log_probs(feature: torch.Tensor, depth: int) -> torch.Tensor:
        logits = target.lm_head(feature).float()
        if noise is not None:
            logits = logits / sampling_temperature + noise[depth - 1]
        return (logits / temperatures[depth - 1]).log_softmax(dim=-1)

    for depth, token in enumerate(path[:num_serial_tokens], start=1):
        feature = drafter(tokens, states).serial_features[:, -1:]
        score += float(log_probs(feature, depth)[0, 0, token])
        token_ids = torch.tensor([[token]])
        fused.append(drafter.fuse(token_ids, feature))
        tokens, states = torch.cat((tokens, token_ids), 1), torch.cat((states, feature), 1)
    if len(path) > num_serial_tokens:
        features = drafter.mlp(torch.cat(fused, dim=-1))[0, :, 0]
        for head, token in enumerate(path[num_serial_tokens:]):
            depth = num_serial_tokens + head + 1
            feature = features[head]
            if drafter.transition is not None:
                feature = feature + drafter.transition[head](drafter.embed_tokens(torch.tensor(path[depth - 2])))
            score += float(log_probs(feature, depth)[token])
    return score
