"""
transformers: a cache for a sliding window of one token keeps the complete text. Seen with 5.24.

Expected: the same tokens with and without a cache. Seen: other tokens.
"""

import torch
import transformers
from transformers import MistralConfig, MistralForCausalLM


torch.manual_seed(0)
size = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
config = MistralConfig(**size, num_key_value_heads=2, initializer_range=0.6, eos_token_id=None, sliding_window=1)
model = MistralForCausalLM(config).double()
texts = [
    model.generate(torch.tensor([[3] * 30]), max_new_tokens=50, use_cache=use_cache) for use_cache in (True, False)
]
print(f"transformers {transformers.__version__}: equal texts expected, found {torch.equal(*texts)}")
