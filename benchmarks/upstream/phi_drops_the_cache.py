"""
transformers: Phi-3 drops the caller's cache where the prompt is longer than the original positions. Seen with 5.24.

Expected: `generate` fills the cache that it is given. Seen: that cache stays empty, also with the default rotary
embedding, which has no switch.
"""

import torch
import transformers
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM


size = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
rope = {"rope_type": "default", "rope_theta": 10000.0}
config = Phi3Config(
    **size, original_max_position_embeddings=16, rope_parameters=rope, pad_token_id=0, eos_token_id=None
)
model, cache = Phi3ForCausalLM(config), DynamicCache(config=config)
model.generate(torch.full((1, 20), 3), max_new_tokens=8, cache=cache)
print(f"transformers {transformers.__version__}: 27 entries expected in the cache, found {cache.get_seq_length()}")
