"""Measures the MTP layer of a small target: the tokens per pass of chains and trees, by depth.

    python benchmarks/measure_mtp.py --kind qwen3_next --target toy                        # in some minutes
    python benchmarks/measure_mtp.py --kind qwen3_next --target toy --assistant further    # the layer, trained further

No target with an MTP layer is shipped, so the first run trains one: on sources of the standard library, with the demo
pair's tokenizer. Its layer is then trained for one further token, as published ones are, and written into the target's
checkpoint under the published names. The prompts are pieces of the same sources. So the figures show the shape, and
not the size, of what to expect.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from demo_pair import DemoPairArguments, parse
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from transformers_gumiho import GumihoModel
from transformers_gumiho.training import GumihoTrainer, GumihoTrainingArguments


WIDTH, LENGTH, ROWS = 96, 128, 8
SOURCES = ("argparse", "calendar", "configparser", "textwrap", "csv", "shutil")
SIZE = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "moe_intermediate_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": WIDTH, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
STATES = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 24, "linear_value_head_dim": 24,
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "mtp_num_hidden_layers": 1,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
KINDS: dict[str, dict[str, Any]] = {"qwen3_next": STATES, "qwen3_5_text": STATES, "glm4_moe": EXPERTS}
# Published names, by the drafter's.
NAMES = {
    "qwen3_next": ("mtp.", {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}, "layers.0."),
    "glm4_moe": ("model.layers.2.", {"fc": "eh_proj", "norm": "shared_head.norm"}, ""),
}
NAMES["qwen3_5_text"] = NAMES["qwen3_next"]


@dataclass(kw_only=True)
class MtpArguments(DemoPairArguments):
    kind: str = field(metadata={"help": f"Type of the target: {', '.join(KINDS)}."})
    target: Path = field(metadata={"help": "Folder of the target. It is trained if there is none."})
    assistant: str = field(default="mtp", metadata={"help": "Another drafter than the target's layer."})
    steps: int = field(default=700, metadata={"help": "Steps of the target's training; half as many of the layer's."})
    depths: list[int] = field(default_factory=lambda: [1, 2, 3, 5, 8], metadata={"help": "Depths of drafts."})
    nodes: int = field(default=12, metadata={"help": "Nodes of the trees."})
    num_prompts: int = field(default=16, metadata={"help": "Prompts of 32 tokens."})
    max_new_tokens: int = field(default=64, metadata={"help": "Tokens of each text."})


def read_ids(args: MtpArguments) -> list[int]:
    """Returns the ids of the sources, and writes them for `gumiho train`."""
    library = Path(random.__file__).parent
    text = "\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in SOURCES)
    ids: list[int] = AutoTokenizer.from_pretrained(args.folders["target"])(text)["input_ids"]
    return ids


def pieces(ids: list[int], length: int, count: int) -> torch.Tensor:
    """Returns random pieces `(count, length)` of a text."""
    starts = [random.randrange(len(ids) - length) for _ in range(count)]
    return torch.tensor([ids[start : start + length] for start in starts])


def train_target(args: MtpArguments, ids: list[int]) -> None:
    """Trains a target and its layer, and writes the checkpoint of both."""
    tokenizer = AutoTokenizer.from_pretrained(args.folders["target"])
    fields = SIZE | KINDS[args.kind] | {"vocab_size": len(tokenizer)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(args.kind, **fields), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.steps)
    for step in range(args.steps):
        batch = pieces(ids, LENGTH, ROWS)
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.2f}", flush=True)
    model.eval().save_pretrained(args.target)
    tokenizer.save_pretrained(args.target)
    write_layer(args, None)
    layer = GumihoModel.from_pretrained(args.target, num_serial_tokens=1, dtype=torch.float32)
    options = GumihoTrainingArguments(
        output_dir=str(args.target / "training"), max_steps=args.steps // 2, per_device_train_batch_size=ROWS,
        learning_rate=2e-3, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, feature_noise=0.0,
        train_only="serial",
    )  # fmt: skip
    rows = [
        {"input_ids": row, "loss_mask": [1] * LENGTH} for row in pieces(ids, LENGTH, ROWS * options.max_steps).tolist()
    ]
    GumihoTrainer(layer, options, target=model, train_dataset=rows).train()
    write_layer(args, layer)


def write_layer(args: MtpArguments, layer: GumihoModel | None) -> None:
    """Adds a layer to the checkpoint of the target; without one, an untrained one like a layer of the target's own."""
    file = args.target / "model.safetensors"
    prefix, renamed, inner = NAMES[args.kind]
    tensors = load_file(file)
    if layer is None:
        start = "model.layers.1."
        own = {f"decoder.layers.0.{name.removeprefix(start)}": t for name, t in tensors.items() if start in name}
        norm = tensors["model.norm.weight"]
        own |= {f"{name}.weight": norm.clone() for name in ("enorm", "hnorm", "norm")}
        own["fc.weight"] = torch.randn(WIDTH, 2 * WIDTH) * 0.05
    else:
        layer.save_pretrained(args.target / "layer", save_original_format=True)
        own = load_file(args.target / "layer" / "model.safetensors")
    for name, tensor in own.items():
        part, dot, rest = name.partition(".")
        if part == "decoder":
            tensors[prefix + inner + name.removeprefix("decoder.layers.0.")] = tensor.clone()
        else:
            tensors[f"{prefix}{renamed.get(part, part)}{dot}{rest}"] = tensor.clone()
    save_file(tensors, file, metadata={"format": "pt"})


def tokens_per_pass(target: PreTrainedModel, drafter: Any, prompts: torch.Tensor, plain: torch.Tensor) -> float:
    """Returns the mean over texts, which equal those of plain decoding."""
    num_new, num_passes = plain.shape[1] - prompts.shape[1], 0
    call = {"max_new_tokens": num_new, "do_sample": False, "return_dict_in_generate": True}
    for ids, text in zip(prompts[:, None], plain, strict=True):
        output = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=drafter, **call)
        assert output.sequences[0].equal(text)
        num_passes += len(output.accepted_lengths[0])
    return (num_new - 1) * len(prompts) / num_passes


def main() -> None:
    args = parse(MtpArguments, __doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    ids = read_ids(args)
    if not (args.target / "config.json").exists():
        train_target(args, ids)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    source = args.target if args.assistant == "mtp" else args.assistant
    drafter = GumihoModel.from_pretrained(source, dtype=torch.float32)
    random.seed(1)
    prompts = pieces(ids, 32, args.num_prompts)
    plain = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=args.max_new_tokens, do_sample=False
    )
    print(f"| {args.kind} | {' | '.join(f'depth {depth}' for depth in args.depths)} |")
    print("|---" * (len(args.depths) + 1) + "|")
    for name, nodes, width in (("chain", None, 1), (f"tree of {args.nodes}", args.nodes, 4)):
        taus = []
        for depth in args.depths:
            drafter.generation_config.update(
                tree_depth=depth, num_assistant_tokens=nodes or depth, branching_factor=width, break_even=1.0
            )
            taus.append(tokens_per_pass(target, drafter, prompts, plain))
        print(f"| {name} | {' | '.join(f'{tau:.2f}' for tau in taus)} |", flush=True)


if __name__ == "__main__":
    main()
