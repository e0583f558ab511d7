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
_SHOWN = ("eval_loss", "eval_expected_acceptance_length", "eval_agreement_")


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
    `Trainer.create_model_card`. The target's name is `finetuned_from`, else that in its config. `phases` names those
    of the training, of which the trainer ran the last, and `forced` the options that were changed within it.
    """
    target = finetuned_from or trainer.target_features.config.name_or_path or "the target"
    datasets, tags = ([value] if isinstance(value, str) else value or [] for value in (dataset, tags))
    # Names on the Hub go into the metadata; folders mean nothing to others.
    is_public = _is_hub_name(target)
    data = ModelCardData(
        language=metadata.get("language"),
        license=metadata.get("license"),
        library_name="transformers",
        base_model=target if is_public else None,
        tags=sorted({*tags, "gumiho", "speculative-decoding"}),
        datasets=[name for name in datasets if _is_hub_name(name)] or None,
    )
    name = trainer.hub_model_id or model_name or trainer.args.output_dir
    is_adapter = trainer.model is not trainer.drafter
    logged = (item for entry in trainer.state.log_history for item in entry.items())
    measured = {key: value for key, value in logged if key.startswith(_SHOWN)}  # the newest value of each
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        name=trainer.hub_model_id or model_name or Path(name).resolve().name,
        target=target,
        link=f"[{target}](https://huggingface.co/{target})" if is_public else f"`{target}`",
        drafter=trainer.drafter.config.name_or_path if is_adapter else name,
        adapter=name if is_adapter else None,
        phases=metadata.get("phases", ()),
        forced=metadata.get("forced", ()),
        training=_table(_facts(trainer)),
        evaluation=_table(measured) if measured else None,
    )


def _is_hub_name(name: str) -> bool:
    return not Path(name).exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) is not None


def _table(facts: dict[str, Any]) -> str:
    shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in facts.items()}
    return "\n".join(["| | |", "|---|---|", *(f"| `{name}` | {value} |" for name, value in shown.items())])


def _facts(trainer: Trainer) -> dict[str, Any]:
    args = trainer.args
    own = sorted({item.name for item in fields(args)} - {item.name for item in fields(TrainingArguments)})
    facts = {"steps": trainer.state.global_step, "epochs": float(trainer.state.epoch or 0)}
    facts |= extract_hyperparameters_from_trainer(trainer) | {name: getattr(args, name) for name in own}
    return facts | {
        "precision": {"no": "float32"}.get(args.mixed_precision, args.mixed_precision),  # the launcher's, too
        "optimizer": "Muon and AdamW" if args.muon else args.optim.value,
        "transformers": transformers_version,
    }
