"""Docstrings for the site: [`Name`] becomes a link, and a name that does not exist is an error."""

import ast
import re
from pathlib import Path
from typing import Any

import griffe
import transformers


PAGES = Path(__file__).parents[1] / "reference" / "api"
_REFERENCE = re.compile(r"\[`~?([\w.]+)`\](?![\[(])")
# The type of an argument, as `name (`int`, defaults to 2):`. The site shows types in a code font already.
_TYPE = re.compile(r"^(\s+\w+ \()(.*)(\):)", re.M)


class References(griffe.Extension):
    """Rewrites every docstring of the package before it is rendered."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        if pkg.name != "transformers_gumiho":
            return
        documented = find_documented(pkg)
        objects = list(walk(pkg))
        names = {name for object_ in objects for name in (object_.name, ".".join(object_.path.split(".")[-2:]))}
        for object_ in objects:
            if object_.is_attribute and object_.docstring is None and (text := help_of(object_)):
                object_.docstring = griffe.Docstring(text, parent=object_)
            if object_.docstring is not None:
                text = _TYPE.sub(
                    lambda match: match[1] + re.sub(r"[\[\]]?`[\[\]]?", "", match[2]) + match[3],
                    object_.docstring.value,
                )
                object_.docstring.value = link(text, object_.path, documented, names)


def help_of(option: griffe.Attribute) -> str:
    """Returns what a field of a class of options says of itself under `--help`; "" for any other attribute."""
    for node in ast.walk(ast.parse(f"({option.value})")):
        if isinstance(node, ast.Dict):
            texts = [
                value
                for key, value in zip(node.keys, node.values, strict=True)
                if key and ast.unparse(key) == "'help'"
            ]
            if texts and isinstance(texts[0], ast.Constant):
                return str(texts[0].value)
    return ""


def link(text: str, where: str, documented: dict[str, str], names: set[str]) -> str:
    """
    Returns a docstring whose references lead to what they name, where a page of the site documents it.

    Raises:
        ValueError: A reference names nothing in the package or in transformers.
    """

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name in documented:
            return f"[`{name}`][{documented[name]}]"
        if name not in names and not _in_transformers(name):
            raise ValueError(f"The docstring of `{where}` refers to [`{name}`], which does not exist.")
        return f"`{name}`"

    return _REFERENCE.sub(replace, text)


def find_documented(pkg: griffe.Module) -> dict[str, str]:
    """Returns the path of each name with a docstring that a page documents, also as `Class.method`."""
    documented: dict[str, str] = {}
    for page in sorted(PAGES.glob("*.md")):
        for path in re.findall(r"^::: ([\w.]+)", page.read_text(encoding="utf-8"), flags=re.M):
            module = pkg[path.partition(".")[2]] if "." in path else pkg
            for member in [module] if not module.is_module else module.members.values():
                if member.is_public and member.docstring is not None:
                    _add(documented, member)
    return documented


def _add(documented: dict[str, str], member: griffe.Object | griffe.Alias) -> None:
    documented.setdefault(member.name, member.path)
    if member.is_class:
        for method in member.members.values():
            if method.is_public and method.docstring is not None:
                documented.setdefault(f"{member.name}.{method.name}", method.path)


def walk(parent: griffe.Object) -> list[griffe.Object]:
    """Returns an object of the package and all that it defines."""
    members = [member for member in parent.members.values() if not member.is_alias]
    return [parent, *(found for member in members for found in walk(member))]


def _in_transformers(name: str) -> bool:
    value: Any = transformers
    for part in name.split("."):
        value = getattr(value, part, None)
    return value is not None
