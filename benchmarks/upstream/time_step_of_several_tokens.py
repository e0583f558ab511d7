"""
transformers: Nemotron-H and Zamba2 bound the time step in passes over several tokens only. Seen with 5.24.

Expected: one pass over a text and one pass per token give the same logits. Seen: other logits.
"""

import torch
import transformers
from families import small_config
from transformers import AutoModelForCausalLM


ids = torch.arange(1, 13)[None]
for family in ("nemotron_h", "zamba2"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(family)).eval()
    with torch.no_grad():
        at_once, cache, singly = model(ids, use_cache=False).logits, None, []
        for place in range(ids.shape[1]):
            output = model(ids[:, place : place + 1], cache=cache, use_cache=True)
            cache = output.cache
            singly.append(output.logits)
    difference = (torch.cat(singly, dim=1) - at_once).norm() / at_once.norm()
    print(f"transformers {transformers.__version__}, {family}: below 1e-05 expected, found {difference:.0e}")
