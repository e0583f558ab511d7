"""The model card of a trained drafter."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from transformers import Trainer, TrainingArguments
from transformers import __version__ as transformers_version
from transformers.modelcard import extract_hyperparameters_from_trainer


_TEMPLATE = Path(__file__).with_name("model_card.md")
_MEANING = """\
On held-out rows. `eval_agreement_k` is the share of positions at which draft k is the target's most likely token.
`eval_expected_acceptance_length` is 1 + p1 + p1 p2 + ... of these shares. `eval_tau` is the measured number of tokens
per pass of the target.

"""
_IMPORTS = """\
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers_gumiho import GumihoModel"""
_SHOWN = ("eval_loss", "eval_tau", "eval_expected_acceptance_length", "eval_agreement_")


def model_card_of(
    trainer: Trainer,
    *,
    model_name: str | None = None,
    finetuned_from: str | None = None,
    dataset: str | list[str] | None = None,
    tags: str | list[str] | None = None,
    **metadata: Any,
) -> ModelCard:
    """
    Returns the card of the drafter in `trainer`, filled from its settings and its log; arguments as in
    `Trainer.create_model_card`. The target's name is `finetuned_from`, else that in its config.
    """
    target = finetuned_from or trainer.target_features.config.name_or_path or "the target"
    # Names on the Hub go into the metadata; folders mean nothing to others.
    datasets = [name for name in ([dataset] if isinstance(dataset, str) else dataset or []) if _is_hub_name(name)]
    tags = [tags] if isinstance(tags, str) else list(tags or [])
    data = ModelCardData(
        language=metadata.get("language"),
        license=metadata.get("license"),
        library_name="transformers",
        base_model=target if _is_hub_name(target) else None,
        tags=sorted({*tags, "gumiho", "speculative-decoding"}),
        datasets=datasets or None,
    )
    is_adapter = trainer.model is not trainer.drafter
    measured: dict[str, Any] = {}  # the newest value of each
    for entry in trainer.state.log_history:
        measured |= {name: value for name, value in entry.items() if name.startswith("eval_")}
    return ModelCard(
        _TEMPLATE.read_text(encoding="utf-8").format(
            card_data=data.to_yaml(),
            name=trainer.hub_model_id or model_name or Path(trainer.args.output_dir).name,
            target=target,
            link=f"[{target}](https://huggingface.co/{target})" if _is_hub_name(target) else f"`{target}`",
            imports=f"from peft import PeftModel\n{_IMPORTS}" if is_adapter else _IMPORTS,
            loading=_loading_code(trainer, trainer.hub_model_id or model_name or trainer.args.output_dir, is_adapter),
            training=_which_training(trainer) + _table(_training_facts(trainer)),
            evaluation=_evaluation(measured),
        )
    )


def _is_hub_name(name: str) -> bool:
    return not Path(name).exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None


def _loading_code(trainer: Trainer, name: str, is_adapter: bool) -> str:
    """Returns the expression that loads the drafter."""
    base = trainer.drafter.config.name_or_path if is_adapter else name
    code = f'GumihoModel.from_pretrained("{base}", dtype=target.dtype, device_map=target.device)'
    return f'PeftModel.from_pretrained({code}, "{name}")' if is_adapter else code


def _which_training(trainer: Trainer) -> str:
    part = trainer.args.train_only
    return f"The last training, which changed only one part of the drafter (`train_only`: {part}).\n\n" if part else ""


def _evaluation(measured: dict[str, Any]) -> str:
    shown = {f"`{name}`": value for name, value in measured.items() if name.startswith(_SHOWN)}
    return _MEANING + _table(shown) if shown else "Not evaluated."


def _table(facts: dict[str, Any]) -> str:
    lines = [
        f"| {name} | {value:.4g} |" if isinstance(value, float) else f"| {name} | {value} |"
        for name, value in facts.items()
    ]
    return "\n".join(["| | |", "|---|---|", *lines]) if lines else ""


def _training_facts(trainer: Trainer) -> dict[str, Any]:
    args = trainer.args
    own = {item.name for item in fields(args)} - {item.name for item in fields(TrainingArguments)}
    settings = extract_hyperparameters_from_trainer(trainer) | {name: getattr(args, name) for name in sorted(own)}
    settings["optimizer"] = args.optim.value
    return {
        "steps": trainer.state.global_step,
        "epochs": float(trainer.state.epoch or 0),
        **{f"`{name}`": value for name, value in settings.items()},
        "transformers": transformers_version,
    }
