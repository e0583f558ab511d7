"""The MTP layers of hybrids whose drafts the oracle does not draw: what they compute for a text."""

from pathlib import Path

import torch
from mtp import Weights, experts, grouped_attention, norm
from safetensors.torch import load_file, save_file
from tiny_configs import VOCAB_SIZE, small_config
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel

from transformers_gumiho import GumihoModel


def write(model_type: str, folder: Path, added: dict[str, str], beside: dict[str, tuple[int, ...]]) -> PreTrainedModel:
    """Writes a random target, with tensors added that have the shapes of its own, by the starts of the names."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(model_type), attn_implementation="eager").eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        for start, new in added.items():
            if name.startswith(start):
                tensors[name.replace(start, new, 1)] = torch.randn(tensor.shape) * 0.3
    tensors |= {name: torch.randn(shape) * 0.3 for name, shape in beside.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def features(folder: Path, target: PreTrainedModel, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    drafter = GumihoModel.from_pretrained(folder, dtype=torch.float32)
    drafter.share_embedding(target)
    with torch.no_grad():
        return drafter(ids, states).serial_features


def test_nemotron_h(tmp_path: Path) -> None:
    vector, first, second = (32,), "mtp.layers.0.", "mtp.layers.1."
    added = {"backbone.layers.2.": first, "backbone.layers.1.": second}
    beside = {f"{first}{name}.weight": vector for name in ("enorm", "hnorm")}
    beside |= {f"{first}eh_proj.weight": (32, 64), f"{second}final_layernorm.weight": vector}
    target = write("nemotron_h", tmp_path, added, beside)
    ids, states = torch.randint(1, VOCAB_SIZE, (1, 9)), torch.randn(1, 9, 32)
    config, tensors = target.config, load_file(tmp_path / "model.safetensors")
    eps = config.layer_norm_epsilon

    def mixer(prefix: str) -> Weights:
        start = f"{prefix}mixer."
        return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}

    pair = (
        norm(target.get_input_embeddings().weight[ids[0]], tensors[f"{first}enorm.weight"], eps),
        norm(states[0], tensors[f"{first}hnorm.weight"], eps),
    )
    hidden = linear(torch.cat(pair, dim=-1), tensors[f"{first}eh_proj.weight"])
    own = norm(hidden, tensors[f"{first}norm.weight"], eps)
    hidden = hidden + grouped_attention(rotary=False)(own, mixer(first), config, None)
    hidden = hidden + experts(norm(hidden, tensors[f"{second}norm.weight"], eps), mixer(second), config)
    wanted = norm(hidden, tensors[f"{second}final_layernorm.weight"], eps)
    torch.testing.assert_close(features(tmp_path, target, ids, states)[0], wanted, atol=1e-4, rtol=1e-4)


def test_bailing_hybrid(tmp_path: Path) -> None:
    names = ("enorm", "hnorm", "shared_head.norm")  # which transformers knows
    beside = {f"model.layers.4.{name}.weight": (32,) for name in names}
    beside["model.layers.4.eh_proj.weight"] = (32, 64)
    target = write("bailing_hybrid", tmp_path, {"model.layers.3.": "model.layers.4."}, beside)
    # What transformers' own layers ask for beside the published config.
    target.config.mtp_layer_types, target.config.mtp_mlp_layer_types = ["full_attention"], ["sparse"]
    ids, states = torch.randint(1, VOCAB_SIZE, (1, 9)), torch.randn(1, 9, 32)
    with torch.no_grad():
        theirs = MtpModel.from_pretrained(target)
        wanted = theirs.forward_layer(0, states, torch.arange(9)[None], None, input_ids=ids)
    file = tmp_path / "model.safetensors"
    published = {name.replace("shared_head.norm", "final_layernorm"): t for name, t in load_file(file).items()}
    save_file(published, file, metadata={"format": "pt"})
    torch.testing.assert_close(features(tmp_path, target, ids, states), wanted, atol=1e-4, rtol=1e-4)
