"""Builds the API reference from the docstrings.

    python docs/build_api_reference.py build/api

A page for each package whose `__all__` is public, and one for each of the modules that hold the method itself. A
reference ([`Name`]) to something that does not exist is an error.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import pdoc
import pdoc.render
import transformers
from pdoc.render_helpers import relative_link

import transformers_gumiho


PUBLIC = ("", ".training", ".tuning", ".benchmarking", ".presenting", ".metrics")
METHOD = (
    ".tree.draft_tree", ".tree.verification", ".drafting.drafter", ".model.parallel_heads",
    ".decoding.sampling_noise", ".losses.terms", ".target.verification_cache", ".target.tree_cache",
    ".target.feature_reader",
)  # fmt: skip
PAGES = [transformers_gumiho.__name__ + name for name in (*PUBLIC, *METHOD)]
_REFERENCE = re.compile(r"\[<code>(?:<a [^>]*>)?~?([\w.]+)(?:</a>)?</code>\]")
_LOCAL_LINK = re.compile(r'<code><a href="#([^"]*)">([^<]*)</a></code>')


def build(folder: Path) -> None:
    """
    Writes the pages into `folder`.

    Raises:
        ValueError: A docstring refers to a name that does not exist.
    """
    for page in PAGES:
        for _, value in members_of(page):
            if isinstance(value, type) and (options := describe_options(value)):
                value.__doc__ = f"{inspect.getdoc(value)}\n\nArgs:\n{options}"
    pdoc.render.configure(docformat="google", include_undocumented=False)
    pdoc.pdoc(*PAGES, output_directory=folder)
    places = find_places()
    for page in PAGES:
        path = folder / f"{page.replace('.', '/')}.html"
        path.write_text(link_references(path.read_text(encoding="utf-8"), page, places), encoding="utf-8")


def describe_options(options: type) -> str:
    """Returns what the fields of a class of options tell of themselves under `--help`, as lines of a docstring."""
    if not dataclasses.is_dataclass(options):
        return ""
    lines = []
    for field in dataclasses.fields(options):
        if field.name in inspect.get_annotations(options) and "help" in field.metadata:
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            told = "" if default is dataclasses.MISSING else f", defaults to `{default!r}`"
            lines.append(
                f"    {field.name} (`{inspect.formatannotation(field.type)}`{told}): {field.metadata['help']}"
            )
    return "\n".join(lines)


def find_places() -> dict[str, tuple[str, str]]:
    """Returns for every name that has an anchor the page and the anchor, the public packages' first."""
    places: dict[str, tuple[str, str]] = {}
    methods: dict[str, tuple[str, str]] = {}
    for page in PAGES:
        for anchor, value in members_of(page):
            places.setdefault(anchor, (page, anchor))
            for name in vars(value) if inspect.isclass(value) else ():
                if not name.startswith("_"):
                    # Within its class, a method is named alone.
                    methods.setdefault(name, (page, f"{anchor}.{name}"))
                    methods.setdefault(f"{anchor}.{name}", (page, f"{anchor}.{name}"))
    return methods | places


def members_of(page: str) -> list[tuple[str, object]]:
    """Returns what a page documents, with the names: what is public, or else what the module defines."""
    module = importlib.import_module(page)
    names = getattr(module, "__all__", None)
    if names is not None:
        return [(name, getattr(module, name)) for name in names]
    own = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
    return [(name, value) for name, value in own if getattr(value, "__module__", None) == module.__name__]


def link_references(html: str, page: str, places: dict[str, tuple[str, str]]) -> str:
    """Returns a page whose references lead to what they name, where that is on a page."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        if name in places:
            other, anchor = places[name]
            return f'<code><a href="{relative_link(page, other)}#{anchor}">{name}</a></code>'
        if not _exists(name):
            raise ValueError(f"A docstring on the page of `{page}` refers to [`{name}`], which does not exist.")
        return f"<code>{name}</code>"

    def keep_if_alive(match: re.Match[str]) -> str:
        # pdoc links the methods that a class has from elsewhere, too, which are not on its page.
        return match[0] if f'id="{match[1]}"' in html else f"<code>{match[2]}</code>"

    return _LOCAL_LINK.sub(keep_if_alive, _REFERENCE.sub(link, html))


def _exists(name: str) -> bool:
    """Whether the package or transformers has something of this name, which may be `Class.method`."""
    first, *rest = name.split(".")
    modules = [transformers] + [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(transformers_gumiho.__path__, f"{transformers_gumiho.__name__}.")
        # This room is for processes of vLLM.
        if not info.name.startswith(f"{transformers_gumiho.__name__}.vllm.")
    ]
    for module in modules:
        value = getattr(module, first, None)
        for part in rest:
            value = getattr(value, part, None)
        if value is not None:
            return True
    return False


if __name__ == "__main__":
    build(Path(sys.argv[1]))
