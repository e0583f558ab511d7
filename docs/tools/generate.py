"""Parts of pages that are generated from code when the site is built: `<!-- generate: NAME -->` in a page."""

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
_MARK = re.compile(r"^<!-- generate: ([\w-]+) -->$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """
    Returns a page with its marks replaced. MkDocs calls this.

    Raises:
        KeyError: No generator has the name of a mark.
    """
    return _MARK.sub(lambda match: GENERATORS[match[1]](), markdown)


def decoding_settings() -> str:
    """Returns a table of the settings in a drafter's `generation_config`, as `DraftingSettings` documents them."""
    from transformers_gumiho import DraftingSettings

    described = describe_attributes(DraftingSettings, "Attributes")
    described.pop("sampling_temperature")  # That of the target, not a setting.
    return table(("setting", "meaning"), [(f"`{name}`", text) for name, text in described.items()])


def config_fields() -> str:
    """Returns a table of the fields of a drafter's `config.json`, as `GumihoConfig` documents them."""
    from transformers_gumiho import GumihoConfig

    defaults = {field.name: field.default for field in dataclasses.fields(GumihoConfig)}
    described = describe_attributes(GumihoConfig, "Args")
    rows = [(f"`{name}`", f"`{defaults[name]!r}`", text) for name, text in described.items()]
    return table(("field", "default", "meaning"), rows)


def training_arguments() -> str:
    """Returns a table of what `GumihoTrainingArguments` adds to `TrainingArguments` or sets differently."""
    from transformers_gumiho.training import GumihoTrainingArguments

    own = inspect.get_annotations(GumihoTrainingArguments)
    rows = []
    for field in dataclasses.fields(GumihoTrainingArguments):
        if field.name in own:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            shown = round(default, 4) if isinstance(default, float) else default
            rows.append((f"`--{field.name}`", f"`{shown!r}`", field.metadata["help"]))
    return table(("option", "default", "meaning"), rows)


def command_line() -> str:
    """Returns the help of `gumiho` and of each of its commands."""
    usage = help_of([])
    commands = re.findall(r"^  (\w+) {2,}", usage, flags=re.M)
    sections = [f"## gumiho {name}\n\n```text\n{help_of([name])}\n```" for name in commands]
    return "\n\n".join([f"```text\n{usage}\n```", *sections])


def help_of(words: list[str]) -> str:
    """Returns what `gumiho WORDS --help` prints."""
    from transformers_gumiho_cli import main

    written, sys.argv = StringIO(), ["gumiho", *words, "--help"]
    os.environ["COLUMNS"] = "110"
    with redirect_stdout(written), suppress(SystemExit):
        main()
    return written.getvalue().rstrip()


def model_types() -> str:
    """Returns the table of the newest sweep over the model types of transformers."""
    (*_, report) = sorted((ROOT / "benchmarks" / "reports").glob("*-model-types.md"))
    return report.read_text(encoding="utf-8").partition("\n\n")[2]


def describe_attributes(documented: type, section: str) -> dict[str, str]:
    """Returns the names in a section of a class's docstring, each with its description."""
    lines = (inspect.getdoc(documented) or "").partition(f"\n{section}:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+)(?: \([^\n]*\))?:((?:.|\n(?!    \w))*)", lines, flags=re.M)
    return {name: re.sub(r"\[(`[^`]+`)\]", r"\1", " ".join(text.split())) for name, text in entries}


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Returns a table in Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


GENERATORS: dict[str, Callable[[], str]] = {
    "settings": decoding_settings,
    "config": config_fields,
    "training-arguments": training_arguments,
    "cli": command_line,
    "model-types": model_types,
}
