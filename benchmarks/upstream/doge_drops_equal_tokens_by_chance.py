"""
transformers: which tokens Doge keeps beyond `keep_window_size` depends on whether there is a cache. Seen with 5.24.

Expected: the same tokens with and without a cache. Seen: other tokens. Equal tokens tie in the first layer's `topk`.
"""

import torch
import transformers
from transformers import DogeConfig, DogeForCausalLM


torch.manual_seed(1)
size = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
config = DogeConfig(**size, keep_window_size=8, initializer_range=0.6, eos_token_id=None, pad_token_id=0)
model, ids = DogeForCausalLM(config).double().eval(), torch.arange(2, 8)[None]
texts = [model.generate(ids, max_new_tokens=30, use_cache=use_cache) for use_cache in (True, False)]
print(f"transformers {transformers.__version__}: equal texts expected, found {torch.equal(*texts)}")
