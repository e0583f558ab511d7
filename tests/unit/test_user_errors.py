"""What a user can fix is reported in one line; what nobody expected keeps its traceback."""

import ast
import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import transformers_gumiho
from transformers_gumiho.commands import (
    UserError,
    UserFileNotFoundError,
    UserFloatingPointError,
    UserImportError,
    UserOSError,
    UserValueError,
    as_user_errors,
    reported_in_one_line,
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserFileNotFoundError("There is no file 'a'."), r"^tool: There is no file 'a'\.$"),
        (UserImportError("Reading this needs `gguf`."), r"^tool: Reading this needs `gguf`\.$"),
        (UserFloatingPointError("Training diverged."), r"^tool: Training diverged\.$"),
        (ModuleNotFoundError("No module named 'gradio'", name="gradio"),
         r"^tool: No module named 'gradio'\. Install it with `pip install 'transformers-gumiho\[demo\]'`\.$"),
        (ModuleNotFoundError("No module named 'datasets.io'", name="datasets.io"), r"-gumiho\[train\]'"),
        (ModuleNotFoundError("No module named 'peft'", name="peft"), r"-gumiho\[train\]'"),
        (OSError(errno.ENOSPC, "No space left on device", "a"), r"^tool: .*No space left on device: 'a'$"),
        (PermissionError(errno.EACCES, "Permission denied", "a"), r"^tool: .*Permission denied: 'a'$"),
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), None),
        (ValueError("not enough values to unpack (expected 2, got 1)"), None),
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "libcuda.so"), None),
        (RuntimeError("an index is out of range"), None),
    ],
    ids=repr,
)  # fmt: skip
def test_errors_are_reported_or_kept(error: Exception, message: str | None) -> None:
    with pytest.raises(SystemExit if message else type(error), match=message), reported_in_one_line("tool"):
        raise error


@pytest.mark.parametrize(
    ("interrupt", "line"),
    [(KeyboardInterrupt(), "tool: Interrupted."), (KeyboardInterrupt("Run it again."), "tool: Run it again.")],
)
def test_ctrl_c_is_one_line_and_the_status_of_a_shell(
    interrupt: KeyboardInterrupt, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught, reported_in_one_line("tool"):
        raise interrupt
    assert caught.value.code == 130
    assert capsys.readouterr().err.splitlines() == ["", line]


@pytest.mark.parametrize("ends_itself", [False, True])
@pytest.mark.parametrize("sink", ["a closed pipe", "/dev/full"])
def test_output_that_is_buffered_meets_its_end_within_the_command(
    sink: str, ends_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the exit Python would only write "Exception ignored" and a traceback. `--help` ends itself."""
    if sink == "/dev/full":
        if not Path(sink).exists():
            pytest.skip("this system has no such device")
        stream = open(sink, "w")  # noqa: SIM115
    else:
        reader, writer = os.pipe()
        os.close(reader)
        stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", stream)

    def command() -> None:
        with reported_in_one_line("tool"):
            stream.write("a line")
            if ends_itself:
                raise SystemExit(0)

    with pytest.raises(SystemExit, match="No space left on device" if sink == "/dev/full" else "^1$"):
        command()
    with suppress(OSError):
        stream.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "a"), UserFileNotFoundError),
        (ConnectionError("The Hub does not answer."), UserOSError),
        (ImportError("Using this target requires `accelerate`."), UserImportError),
        (ValueError("Unrecognized model."), UserValueError),
        (UserValueError("There is no pair 'b'."), UserValueError),
        (ModuleNotFoundError("No module named 'datasets'", name="datasets"), ModuleNotFoundError),
        (RuntimeError("a mismatch of shapes"), RuntimeError),
    ],
    ids=repr,
)
def test_errors_of_libraries_are_the_users_where_as_user_errors(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, as_user_errors():
        raise error
    assert type(caught.value) is kind
    assert str(caught.value) == str(error)


def test_the_package_raises_user_errors() -> None:
    """Commands show a traceback of all others. vLLM and `evaluate` have their own."""
    built_in = {kind.__name__ for user in UserError.__subclasses__() for kind in user.__bases__} - {"UserError"}
    root, bare = Path(transformers_gumiho.__file__).parent, []
    for path in root.rglob("*.py"):
        if {"vllm", "metrics"} & set(path.relative_to(root).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
                bare += [f"{path}:{node.lineno}"] if node.exc.func.id in built_in | {"FileNotFoundError"} else []
    assert built_in == {"FloatingPointError", "ImportError", "OSError", "ValueError"}
    assert bare == []
