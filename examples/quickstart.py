"""Decodes one text of the demo pair with and without its drafter.

python examples/quickstart.py
"""

import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from transformers_gumiho import GumihoModel


logging.disable_progress_bar()
pair = Path(__file__).parent / "demo_pair"
target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(pair / "target")
gumiho = GumihoModel.from_pretrained(pair / "gumiho", dtype=torch.float32)

prompt = json.loads((pair / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0])["text"]
inputs = tokenizer(prompt, return_tensors="pt")
settings = {"max_new_tokens": 128, "do_sample": False, "return_dict_in_generate": True}
seconds, outputs = {}, {}
for _ in range(2):  # the first round warms up
    for name, assistant in [("plain generate()", None), ("with the drafter", gumiho)]:
        start = time.perf_counter()
        outputs[name] = target.generate(**inputs, **settings, assistant_model=assistant)
        seconds[name] = time.perf_counter() - start

(plain, drafted), length = outputs.values(), inputs.input_ids.shape[1]
print(f"--- prompt\n{prompt}\n--- with the drafter\n{tokenizer.decode(drafted.sequences[0, length:])}\n---")
print(f"\nthe same tokens as plain generate()  {torch.equal(plain.sequences, drafted.sequences)}")
cycles = zip(drafted.accepted_lengths[0], drafted.draft_origins, strict=True)
lengths = [number for number, origin in cycles if origin == "drafter"]  # it may also have paused
print(f"tokens per drafted pass (tau)        {sum(lengths) / len(lengths):.2f}")
for name, output in outputs.items():
    print(f"{name:<36} {len(output.sequences[0, length:]) / seconds[name]:.0f} tokens/s")
