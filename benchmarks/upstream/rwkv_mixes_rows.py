"""
transformers: RWKV's pass over one token mixes the rows of a batch. Seen with 5.24.

Expected: after a prompt, a row of a batch gets the logits that it gets alone. Seen: other logits.
"""

import torch
import transformers
from transformers import RwkvConfig, RwkvForCausalLM


torch.manual_seed(0)
config = RwkvConfig(vocab_size=32, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
model = RwkvForCausalLM(config).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.5)


@torch.no_grad()
def after_prompt(ids: torch.Tensor) -> torch.Tensor:
    state = model(ids[:, :-1], use_cache=True).state
    return model(ids[:, -1:], state=state, use_cache=True).logits[:, -1]


ids = torch.tensor([[3, 7, 9, 4], [11, 2, 5, 8]])
alone = torch.cat([after_prompt(row[None]) for row in ids])
difference = (after_prompt(ids) - alone).norm() / alone.norm()
print(f"transformers {transformers.__version__}: below 1e-05 expected, found {difference:.0e}")
