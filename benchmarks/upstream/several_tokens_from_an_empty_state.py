"""
transformers: Mamba, FalconMamba, Jamba and Zamba drop the state of the cache in passes over several tokens.

Seen with 5.24. Expected: behind a prompt, one pass over four tokens and one pass per token give the same logits. Seen:
other logits.
"""

import copy

import torch
import transformers
from families import small_config
from transformers import AutoModelForCausalLM


ids = torch.arange(1, 13)[None]
for family in ("mamba", "falcon_mamba", "jamba", "zamba"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(family)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        cache, singly = model(ids[:, :8], use_cache=True).cache, []
        at_once = model(ids[:, 8:], cache=copy.deepcopy(cache), use_cache=True).logits
        for place in range(8, ids.shape[1]):
            output = model(ids[:, place : place + 1], cache=cache, use_cache=True)
            cache = output.cache
            singly.append(output.logits)
    difference = (at_once - torch.cat(singly, dim=1)).norm() / at_once.norm()
    print(f"transformers {transformers.__version__}, {family}: below 1e-05 expected, found {difference:.0e}")
