"""What a user can mend is told in one line; what nobody expected keeps its traceback."""

import pytest

from transformers_gumiho.user_errors import reported_in_one_line


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError("There is no file 'a'."), r"^tool: There is no file 'a'\.$"),
        (ImportError("Reading this needs `gguf`."), r"^tool: Reading this needs `gguf`\.$"),
        (ModuleNotFoundError("No module named 'gradio'", name="gradio"),
         r"^tool: No module named 'gradio'\. Install it with `pip install 'transformers-gumiho\[demo\]'`\.$"),
        (ModuleNotFoundError("No module named 'matplotlib.axes'", name="matplotlib.axes"), r"-gumiho\[benchmark\]'"),
        (ModuleNotFoundError("No module named 'peft'", name="peft"), r"-gumiho\[train\]'"),
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), r"^tool: No module named 'yaml'$"),
        (ModuleNotFoundError("This needs a module."), r"^tool: This needs a module\.$"),
        (KeyboardInterrupt(), None),
        (RuntimeError("an index is out of range"), None),
    ],
    ids=repr,
)  # fmt: skip
def test_errors_are_told_or_kept(error: BaseException, message: str | None) -> None:
    with pytest.raises(SystemExit if message else type(error), match=message), reported_in_one_line("tool"):
        raise error


def test_further_errors_are_told() -> None:
    with pytest.raises(SystemExit, match=r"^tool: the server is gone$"), reported_in_one_line("tool", RuntimeError):
        raise RuntimeError("the server is gone")
