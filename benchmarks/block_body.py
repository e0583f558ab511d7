"""A Gumiho drafter with one block of layers in the place of the MLP heads, for `compare_bodies.py`."""

import copy
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from transformers_gumiho import GumihoConfig, GumihoModel
from transformers_gumiho.generation.verification.tree_cache import TreeCache
from transformers_gumiho.internals import CACHE_NAME
from transformers_gumiho.model.block_layers import context_entries
from transformers_gumiho.model.parallel_heads import GumihoParallelHeads
from transformers_gumiho.model.serial_layers import make_layer
from transformers_gumiho.training.unrolling import StepCache


def count(module: nn.Module) -> int:
    """Returns the number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


class BlockBody(nn.Module):
    """
    Layers that predict the states of all later depths in one pass over each path, in the place of the MLP heads.

    Their keys and values of the text are those of the serial head's inputs, normed, and the same for all layers.
    """

    def __init__(self, config: GumihoConfig, num_layers: int, intermediate_size: int | None = None):
        super().__init__()
        llama = copy.deepcopy(config.get_text_config())
        self.num_queries, self.num_serial = config.num_parallel_heads, config.num_serial_tokens
        self.first_layer, width = llama.num_hidden_layers, llama.hidden_size
        # By default as many parameters as the MLP heads have: the layers' MLPs are as wide as that allows.
        heads, own = GumihoParallelHeads(config), (self.num_queries + 1) * width
        llama.intermediate_size = 1
        smallest = count(make_layer(llama, self.first_layer)) - 3 * width
        widest = ((count(heads) - own) // num_layers - smallest) // (3 * width)
        llama.intermediate_size = intermediate_size or widest
        layers = range(self.first_layer, self.first_layer + num_layers)
        self.layers = nn.ModuleList(make_layer(llama, index) for index in layers)
        self.masks = nn.Parameter(torch.randn(self.num_queries - 1, width) * config.initializer_range)
        self.context_norm = LlamaRMSNorm(width, eps=llama.rms_norm_eps)
        self.norm = LlamaRMSNorm(width, eps=llama.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=llama)
        self.cache: Any = None  # of the serial head, in drafting

    def batched_weights(self) -> None:
        """Says that `forward` is to be run."""

    def write_context(self, fused: torch.Tensor, position_ids: torch.Tensor, cache: Any) -> None:
        """Adds keys and values of inputs of the serial head, `(B, n, H)`, to the cache of each layer."""
        context = self.context_norm(fused)
        cos, sin = self.rotary_emb(context, position_ids)
        for index, layer in enumerate(self.layers, self.first_layer):
            cache.update(*context_entries(layer.self_attn, context, cos, sin), index)

    def forward(self, path_inputs: torch.Tensor) -> torch.Tensor:
        """Maps inputs of paths in drafting, `(1, P, S * H)`, to features `(1, D, P, H)`."""
        cache, start = self.cache, self.cache.lengths[0]
        bases = torch.full(path_inputs.shape[:2], start - 1)
        inputs, above, positions = self.split(path_inputs, bases)
        self.write_context(above, positions[:, : above.shape[1]], cache)
        cache.num_pending = above.shape[1]
        features = self.run(inputs, positions[:, above.shape[1] :], self.mask(bases, start), cache)
        cache.num_pending = 0
        return features

    def forward_text(self, path_inputs: torch.Tensor, bases: torch.Tensor, fused: torch.Tensor) -> torch.Tensor:
        """The same after each of the positions `bases` `(B, P)` of texts `fused` `(B, T, H)`, in training."""
        inputs, above, positions = self.split(path_inputs, bases)
        text = StepCache()
        self.write_context(fused, torch.arange(fused.shape[1])[None], text)
        path = StepCache(text)
        self.write_context(above, positions[:, : above.shape[1]], path)
        mask = self.mask(bases, fused.shape[1])
        return self.run(inputs, positions[:, above.shape[1] :], mask, StepCache(path))

    def split(self, path_inputs: torch.Tensor, bases: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """
        Returns the queries `(B, P * D, H)`, the serial tokens above the newest `(B, P * (S - 1), H)`, and their
        positions, first of these tokens and then of the queries, `(B, P * (S - 1) + P * D)`.
        """
        of_tokens = path_inputs.unflatten(-1, (self.num_serial, -1))  # (B, P, S, H)
        masks = self.masks.to(of_tokens).expand(*bases.shape, -1, -1)
        inputs = torch.cat((of_tokens[:, :, -1:], masks), dim=2).flatten(1, 2)
        depths = torch.arange(1, self.num_serial + self.num_queries)
        above, below = (bases[..., None] + depths).split([self.num_serial - 1, self.num_queries], dim=-1)
        return inputs, of_tokens[:, :, :-1].flatten(1, 2), torch.cat((above.flatten(1), below.flatten(1)), dim=1)

    def mask(self, bases: torch.Tensor, num_text: int) -> torch.Tensor:
        """Returns which keys a query sees, `(B, 1, P * D, keys)`: the text up to its base, and its own path."""
        num_paths = bases.shape[1]
        path_of = torch.arange(num_paths)
        query, above = (path_of.repeat_interleave(n) for n in (self.num_queries, self.num_serial - 1))
        text = torch.arange(num_text) <= bases[:, query, None]
        own = (query[:, None] == torch.cat((above, query))).expand(len(bases), -1, -1)
        return torch.cat((text, own), dim=-1)[:, None]

    def run(self, inputs: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Any) -> torch.Tensor:
        """Runs the layers on the queries of all paths. Returns features `(B, D, P, H)`."""
        position_embeddings, states = self.rotary_emb(inputs, positions), inputs
        for layer in self.layers:
            states = layer(
                states, attention_mask=mask, position_embeddings=position_embeddings, use_cache=True,
                **{CACHE_NAME: cache},
            )  # fmt: skip
        return self.norm(states).unflatten(1, (-1, self.num_queries)).transpose(1, 2)


class BlockGumiho(GumihoModel):
    """A Gumiho drafter with a block in the place of the MLP heads. It drafts for one row, without fixed shapes."""

    def __init__(self, config: GumihoConfig, num_layers: int, intermediate_size: int | None = None):
        super().__init__(config)
        self.mlp: Any = BlockBody(config, num_layers, intermediate_size)
        self.mlp.apply(self._init_weights)
        self._reads_text = False

    def read_target(self, target_states: torch.Tensor) -> torch.Tensor:
        # Drafting reads the target for tokens of the text, and not for those of a path.
        self._reads_text = True
        return super().read_target(target_states)

    def run_serial_head(
        self,
        fused: torch.Tensor,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        features = super().run_serial_head(fused, attention_mask, position_ids, cache, **kwargs)
        if isinstance(cache, TreeCache) and position_ids is not None and self._reads_text:
            self.mlp.cache = cache
            self.mlp.write_context(fused, position_ids, cache)
        self._reads_text = False
        return features
