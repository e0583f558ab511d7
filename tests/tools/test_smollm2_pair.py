"""The drafter of the pair smollm2, with a target of the same shape: the real one is not part of the repository."""

import re
import statistics
from pathlib import Path

import pytest
import torch
from targets import equals_plain
from transformers import LlamaConfig, LlamaForCausalLM

from transformers_gumiho import GumihoModel
from transformers_gumiho.tools.pairs import PairArguments, cpu_dtype, find_drafter, load_pair
from transformers_gumiho.tools.pairs.smollm2 import INSTALL, installed_file
from transformers_gumiho.training.data.open_text import encode_turn


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("capabilities", "dtype"),
    [({"avx512_bf16": True}, "bfloat16"), ({"amx_bf16": True}, "bfloat16"), ({"avx2": True}, "float32")],
)
def test_a_large_pair_runs_in_16_bits_where_the_cpu_computes_in_them(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], dtype: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert cpu_dtype("smollm2") == dtype
    assert cpu_dtype("demo") == "float32"


def test_the_drafter_is_small_and_decodes_a_target_of_its_shape_exactly() -> None:
    folder = Path(find_drafter("smollm2"))
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 42e6
    drafter = GumihoModel.from_pretrained(folder, dtype="auto")
    assert drafter.dtype == torch.bfloat16
    assert not drafter.config.has_embedding
    assert len(drafter.generation_config.draft_vocabulary) == 10240
    torch.manual_seed(0)
    # SmolLM2-135M-Instruct's.
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30,
        vocab_size=49152, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    drafter = drafter.float()
    prompt = torch.randint(3, 49152, (1, 20))
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7}):
        equals_plain(target, drafter, 1, input_ids=prompt, max_new_tokens=24, **sampling)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_command_of_the_readme_ends_with_the_same_text_on_any_cpu(dtype: str) -> None:
    """No two tokens are nearly tied, so no CPU chooses another one. The drafter shows what it can."""
    if installed_file() is None:
        pytest.skip(f"needs a package: `{INSTALL}`")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (prompt,) = re.findall(r'gumiho generate --pair smollm2 --compare --prompt "(.*)"', readme)
    target, tokenizer, drafter = load_pair(PairArguments(pair="smollm2", dtype=dtype))
    asked = torch.tensor([encode_turn(tokenizer, [prompt], [])])
    options = {"do_sample": False, "max_new_tokens": 256, "return_dict_in_generate": True}
    plain = target.generate(asked, **options, output_logits=True)
    drafted = target.generate(asked, **options, assistant_model=drafter)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert statistics.mean(drafted.accepted_lengths[0]) > 2.5
    if dtype == "float32":
        highest = torch.cat(plain.logits).topk(2).values
        assert (highest[:, 0] - highest[:, 1]).min() >= 0.5
