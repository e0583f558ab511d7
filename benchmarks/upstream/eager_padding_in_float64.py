"""
transformers: eager attention in float64 makes padded rows not-a-number. Seen with 5.24.

Expected: numbers, as in float32. Seen: NaN. The softmax is computed in float32, where float64's least value is -inf.
"""

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM


config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
model = LlamaForCausalLM(config)
model.set_attn_implementation("eager")
ids, mask = torch.tensor([[0, 0, 9]]), torch.tensor([[0, 0, 1]])
for dtype in (torch.float32, torch.float64):
    has_nan = model.to(dtype)(ids, attention_mask=mask).logits[:, -1].isnan().any().item()
    print(f"transformers {transformers.__version__}, {dtype}: no NaN expected, found {has_nan}")
