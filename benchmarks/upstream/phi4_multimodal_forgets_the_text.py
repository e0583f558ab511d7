"""
transformers: Phi-4-multimodal reads one token alone where a text grows beyond the original positions. Seen with 5.24.

Expected: the target writes the same text with a cache and without one. Seen: another text.
"""

import torch
import transformers
from families import small_config
from transformers import AutoModelForCausalLM


torch.manual_seed(0)
rope = {"rope_type": "default", "rope_theta": 10000.0}
config = small_config(
    "phi4_multimodal", original_max_position_embeddings=16, rope_parameters=rope, initializer_range=0.6
)
model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.arange(1, 13)[None]
options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
cached, expected = (model.generate(ids, **options, use_cache=use)[0, 12:].tolist() for use in (True, False))
print(f"transformers {transformers.__version__}: {expected} expected, found {cached}")
