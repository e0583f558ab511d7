"""Docstrings of public names tell what a reader of the API reference needs: parameters, shapes and errors."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator

import pytest

import transformers_gumiho


PACKAGES = ("", ".training", ".tools.tuning", ".tools.benchmarking", ".tools.presenting", ".tools.metrics")
# A docstring may hand its parameters on to another one.
HANDS_ON = re.compile(r"[Aa]rguments (are|as|have)|Its arguments")


def public_values() -> Iterator[tuple[str, object]]:
    for package in PACKAGES:
        module = importlib.import_module(transformers_gumiho.__name__ + package)
        for name in module.__all__:
            if not isinstance(getattr(module, name), str):
                yield f"{module.__name__}.{name}", getattr(module, name)


def public_functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """Yields public functions, and methods that are no others' (a library's own methods have its documentation)."""
    for label, value in public_values():
        if inspect.isfunction(value):
            yield label, inspect.unwrap(value)
        if inspect.isclass(value):
            for name, member in vars(value).items():
                function = getattr(member, "__func__", member)
                is_inherited = any(hasattr(base, name) for base in value.__mro__[1:])
                if inspect.isfunction(function) and not name.startswith("_") and not is_inherited:
                    yield f"{label}.{name}", inspect.unwrap(function)


VALUES, FUNCTIONS = dict(public_values()), dict(public_functions())


@pytest.mark.parametrize("label", [*VALUES, *FUNCTIONS])
def test_every_public_name_has_a_docstring(label: str) -> None:
    assert (VALUES | FUNCTIONS)[label].__doc__


@pytest.mark.parametrize("label", FUNCTIONS)
def test_docstrings_tell_every_parameter(label: str) -> None:
    docstring = inspect.getdoc(FUNCTIONS[label]) or ""
    parameters = set(inspect.signature(FUNCTIONS[label]).parameters) - {"self", "cls", "args", "kwargs"}
    untold = {name for name in parameters if not re.search(rf"\b{name}\b", docstring)}
    assert not untold or HANDS_ON.search(docstring)


@pytest.mark.parametrize("label", FUNCTIONS)
def test_docstrings_tell_the_shapes_of_tensors(label: str) -> None:
    docstring = inspect.getdoc(FUNCTIONS[label]) or ""
    for name, annotation in inspect.get_annotations(FUNCTIONS[label]).items():
        if "Tensor" in str(annotation) and name != "like" and not HANDS_ON.search(docstring):
            assert re.search(r"`\([^`]*\)`|single number|`\w+` holds", docstring), name


@pytest.mark.parametrize("label", [label for label, value in VALUES.items() if inspect.isclass(value)])
def test_docstrings_tell_every_field_and_every_parameter_of_a_class(label: str) -> None:
    value = VALUES[label]
    docstring = inspect.getdoc(value) or ""
    names: set[str] = set()
    if dataclasses.is_dataclass(value):
        own = inspect.get_annotations(value)
        # The help of an option is shown where the options are.
        fields = [field for field in dataclasses.fields(value) if field.name in own and "help" not in field.metadata]
        names = {field.name for field in fields}
    elif "__init__" in vars(value):
        names = set(inspect.signature(value.__init__).parameters) - {"self", "args", "kwargs"}
    untold = {name for name in names if not re.search(rf"\b{name}\b", docstring)}
    assert not untold or "[`DraftingSettings`]" in docstring


@pytest.mark.parametrize("label", [*VALUES, *FUNCTIONS])
def test_docstrings_tell_the_errors_that_are_raised(label: str) -> None:
    value = (VALUES | FUNCTIONS)[label]
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    if inspect.isclass(value):
        # The errors of other methods are told there.
        (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef)]
        tree = ast.Module([node for node in body if getattr(node, "name", "") == "__init__"], [])
    raised = {
        node.exc.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    told = (inspect.getdoc(value) or "").partition("Raises:")[2]
    # An error that a user can fix is documented as the built-in one that it also is.
    assert all(name.removeprefix("User") in told for name in raised), raised
