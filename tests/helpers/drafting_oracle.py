"""Drafts and their scores, computed without caches."""

import torch
from transformers import PreTrainedModel

from transformers_gumiho import DraftingSettings, GumihoCandidateGenerator, GumihoModel
from transformers_gumiho.generation.drafting.drafter import GenerationView
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

    view = GenerationView(peek_noise=peek_noise)
    return GumihoCandidateGenerator(drafter, head, settings, cache, generation=view, token_ids=token_ids)


def states_of(target: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return target.model(ids).last_hidden_state


def scores_of_paths(
    target: PreTrainedModel,
    drafter: GumihoModel,
    ids: torch.Tensor,
    paths: torch.Tensor,
    noise: torch.Tensor | None = None,
    sampling_temperature: float = 1.0,
) -> torch.Tensor:
    """
    The summed log-probabilities `(N,)` of paths `(N, depth)` below the text `ids` (`(1, T)`), from whole forward
    passes without any cache; noise is `(depth, V)`.
    """
    given = drafter.generation_config.draft_temperature
    # The last of a list goes on below.
    temperatures = given + given[-1:] * paths.shape[1] if isinstance(given, list) else [given] * paths.shape[1]
    tokens, states = ids[:, 1:].expand(len(paths), -1), states_of(target, ids)[:, :-1].expand(len(paths), -1, -1)
    num_serial_tokens = drafter.config.num_serial_tokens
    scores, fused = torch.zeros(len(paths)), []

    def log_probs(features: torch.Tensor, depth: int) -> torch.Tensor:
        logits = target.lm_head(features).float()
        if noise is not None:
            logits = logits / sampling_temperature + noise[depth - 1]
        every_token = (logits / temperatures[depth - 1]).log_softmax(dim=-1)
        return every_token.gather(1, paths[:, depth - 1 : depth]).squeeze(1)

    for depth, token_ids in enumerate(paths[:, :num_serial_tokens].split(1, dim=1), start=1):
        feature = drafter(tokens, states).serial_features[:, -1:]
        scores += log_probs(feature[:, 0], depth)
        fused.append(drafter.fuse(token_ids, feature))
        tokens, states = torch.cat((tokens, token_ids), 1), torch.cat((states, feature), 1)
    if paths.shape[1] > num_serial_tokens:
        features = drafter.mlp(torch.cat(fused, dim=-1))[:, :, 0]
        for head, depth in enumerate(range(num_serial_tokens + 1, paths.shape[1] + 1)):
            feature = features[:, head]
            if drafter.transition is not None:
                feature = feature + drafter.transition[head](drafter.embed_tokens(paths[:, depth - 2]))
            scores += log_probs(feature, depth)
    return scores
