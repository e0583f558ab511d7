"""
transformers: DeepSeek V4, GIT, MiniMax and MiniMax M3 look for a row's padding at wrong slots. Seen with 5.24.

Expected: a row with padding on the left gets the logits of the same text alone. Seen: other logits.
"""

import torch
import transformers
from families import small_config
from transformers import AutoModelForCausalLM


ids, padding = torch.arange(1, 13)[None], torch.full((1, 5), 20)
mask = torch.cat((torch.zeros_like(padding), torch.ones_like(ids)), dim=1)
for family, settings in (
    ("deepseek_v4", {}),
    ("git", {}),  # without an image
    ("minimax", {"layer_types": ["linear_attention", "full_attention"] * 2}),
    ("minimax_m3_vl_text", {}),
):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(family, **settings)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    alone = model.generate(ids, **options, output_logits=True)
    padded = model.generate(torch.cat((padding, ids), dim=1), attention_mask=mask, **options, output_logits=True)
    logits, others = (torch.stack(output.logits) for output in (alone, padded))
    difference = (logits - others).norm() / logits.norm()
    print(f"transformers {transformers.__version__}, {family}: below 1e-05 expected, found {difference:.0e}")
