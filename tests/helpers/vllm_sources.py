"""Sources that hold what the plug-in needs of vLLM, and nothing else."""

from pathlib import Path

from transformers_gumiho.vllm.contract import HOOKS


def write_sources(root: Path, version: str = "0.32.0", without: str = "") -> Path:
    """Writes a package `vllm` below `root` with all hooks but the one that is called `without`, and returns `root`."""
    texts: dict[str, str] = {"vllm._version": f"__version__ = version = '{version}'\n"}
    for (module, owner), members in HOOKS.items():
        text = _definition(owner, members.get(""))
        for member, parameters in members.items():
            if member and f"{owner}.{member}" != without:
                text += f"    def {member}({_parameters(parameters)}): ...\n" if parameters else f"    {member}: int\n"
        texts[module] = texts.get(module, "") + (text if owner != without else "")
    for module, text in texts.items():
        folder = root.joinpath(*module.split("."))
        is_package = any(other.startswith(f"{module}.") for other in texts)
        file = folder / "__init__.py" if is_package else folder.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def _definition(owner: str, parameters: str | None) -> str:
    return f"def {owner}({_parameters(parameters)}): ...\n" if parameters else f"class {owner}:\n    pass\n"


def _parameters(names: str) -> str:
    return ", ".join("*others" if name == "..." else name for name in names.split())
