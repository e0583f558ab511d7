"""The notebooks of the site: pages are made of them when it is built, and this command executes them.

    python docs/tools/notebooks.py

It writes the outputs into the files. Cells with the tag `machine` show what depends on the machine: their outputs are
left out.
"""

import json
import sys
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each notebook. MkDocs calls this."""
    from mkdocs.structure.files import File

    for path in NOTEBOOKS:
        content = to_markdown(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=content))
    return files


def to_markdown(notebook: dict[str, Any]) -> str:
    """Returns a notebook as a page in Markdown, whose links to notebooks lead to their pages."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace(".ipynb)", ".md)"))
        else:
            parts += [f"```python\n{source}\n```", *map(_shown, cell["outputs"])]
    return "\n\n".join(parts)


def _shown(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = {kind: "".join(value) for kind, value in output["data"].items()}
    if "image/svg+xml" in data:
        return data["image/svg+xml"]
    if "image/png" in data:
        return f'<img src="data:image/png;base64,{data["image/png"].strip()}" alt="The plot that the cell draws">'
    return f"```text\n{data['text/plain']}\n```"


def execute(path: Path) -> Any:
    """
    Returns a notebook with the outputs of its cells. They run in the repository's root.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    return notebook


def tidy(notebook: Any) -> Any:
    """Removes what differs from run to run: times, logs, progress bars, and what a machine decides."""
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            kept = [] if "machine" in cell.metadata.get("tags", []) else cell.outputs
            cell.outputs = [output for output in kept if output.get("name") != "stderr"]
    return notebook


def main() -> None:
    import nbformat

    for path in NOTEBOOKS:
        sys.stdout.write(f"{path.name}: some minutes\n")
        nbformat.write(tidy(execute(path)), path)


if __name__ == "__main__":
    main()
