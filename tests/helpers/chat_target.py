"""A tiny random target that chats: it says anything, and ends now and then."""

from pathlib import Path

import torch
from training_data import CHATML, make_tokenizer, write_jsonl
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast


def make_chat_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Returns the demo pair's tokenizer with the end of a turn as its end."""
    tokenizer = make_tokenizer(chat_template)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    return tokenizer


def make_chat_target(mean_length: float = 15, seed: int = 1, num_heads: int = 4) -> PreTrainedModel:
    """Returns a random target whose texts have about so many tokens where they are sampled."""
    torch.manual_seed(seed)
    tokenizer = make_chat_tokenizer()
    end = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=num_heads, num_key_value_heads=(num_heads + 1) // 2, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=end, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    # A coordinate that is large in every state tells nothing, so its weight is a bias of the end's logit.
    with torch.no_grad():
        target.model.embed_tokens.weight[:, 0] = 20.0
        # Some tokens are much more probable than others, so that the end is rare where the most probable one is taken.
        target.lm_head.weight *= 3
        target.lm_head.weight[:, 0] = 0.0
        states = target.model(torch.arange(len(tokenizer))[None, ::7]).last_hidden_state[0]
        others = target.lm_head(states).float().logsumexp(dim=-1).mean()
        target.lm_head.weight[end] = 0.0
        target.lm_head.weight[end, 0] = (others - torch.log(torch.tensor(mean_length))) / states[:, 0].mean()
    target.generation_config.do_sample = True
    return target


def write_chat_target(folder: Path) -> Path:
    """Writes a target that chats into a folder, and questions for it beside it. Returns the folder."""
    make_chat_target().save_pretrained(folder / "target")
    make_chat_tokenizer().save_pretrained(folder / "target")
    write_jsonl(folder / "questions.jsonl", [{"prompt": f"import {'os ' * (n % 5)}what, {n}?"} for n in range(40)])
    return folder
