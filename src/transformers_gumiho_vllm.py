"""
The entry point through which vLLM learns of Gumiho drafters.

Every process of every vLLM calls [`register`], with a drafter or without one. So it stands outside the package, whose
import takes its time and changes `generate()`, and only notes what to import where a Gumiho drafter is asked for.
"""

import functools
import importlib
import importlib.util
import json
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any


# The releases of vLLM that the tests have run with. What is replaced here is not part of its interface.
TESTED_RELEASES = ("0.31", "0.32")

ARCHITECTURE = "EagleGumihoModel"
_MODEL = "transformers_gumiho.vllm.model:GumihoForCausalLM"
# By its module and name: the class that drafts, in each of vLLM's two model runners, and where ours for it is.
_DRAFTING_CLASSES = {
    "vllm.v1.spec_decode.eagle": ("EagleProposer", "transformers_gumiho.vllm.proposer", "GumihoProposer"),
    "vllm.v1.worker.gpu.spec_decode.eagle.speculator": (
        "EagleSpeculator", "transformers_gumiho.vllm.speculator", "GumihoSpeculator",
    ),
}  # fmt: skip

# Below vLLM's own logger, whose handlers and level are the user's settings.
logger = logging.getLogger("vllm.transformers_gumiho")


def register() -> None:
    """
    Makes vLLM draft with the Gumiho drafters that it is given; calling this again changes nothing.

    With a vLLM that brings Gumiho itself, nothing is done. With one that was not tested, only the refusal of Gumiho
    drafters is; whatever else vLLM is used for goes on as without this package.
    """
    try:
        reason = _reason_to_step_aside()
        if reason is None:
            _register_model()
            for module, names in _DRAFTING_CLASSES.items():
                _after_import(module, functools.partial(_choose_by_drafter, *names))
        else:
            _say_once(f"{reason} The Gumiho plug-in steps aside.")
        if not _has_own_gumiho():
            _read_configs_of_drafters(reason)
    except Exception as error:
        _say_what_does_not_fit(error)


def _reason_to_step_aside() -> str | None:
    if _has_own_gumiho():
        return "This vLLM has Gumiho itself."
    version = str(importlib.import_module("vllm").__version__)
    if re.sub(r"^(\d+\.\d+).*", r"\1", version) not in TESTED_RELEASES:
        return (
            f"This is vLLM {version}, and transformers-gumiho has been tested with "
            f"{', '.join(f'{release}.*' for release in TESTED_RELEASES)}."
        )
    return None


def _has_own_gumiho() -> bool:
    registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    return any("Gumiho" in name and name != ARCHITECTURE for name in registry.models)


def _register_model() -> None:
    registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
    if ARCHITECTURE not in registry.models:
        registry.register_model(ARCHITECTURE, _MODEL)


def _say_once(message: str) -> None:
    """Writes to the log, in the process that started the others."""
    if multiprocessing.parent_process() is None:
        logger.warning(message)


def _say_what_does_not_fit(error: Exception) -> None:
    """Takes the place of raising it: a vLLM that is used without Gumiho must not notice."""
    _say_once(f"The Gumiho plug-in does not fit this vLLM and steps aside ({type(error).__name__}: {error}).")


# Which configs are read by us.


def _read_configs_of_drafters(refusal: str | None) -> None:
    """Makes vLLM read the configs of Gumiho drafters by this package, or refuse them for the reason given."""
    # Where it is called, not where it is defined: vLLM imports the function by its name.
    module: Any = importlib.import_module("vllm.config.model")
    plain = module.get_config
    if hasattr(plain, "reads_gumiho"):
        return

    @functools.wraps(plain)
    def get_config(model: Any, trust_remote_code: bool, revision: str | None = None, *args: Any, **kwargs: Any) -> Any:
        token = kwargs.get("token")
        if os.path.exists(model) or "gumiho" in str(model).lower():
            if not is_drafter(model, revision, token):
                return plain(model, trust_remote_code, revision, *args, **kwargs)
        else:
            # For all other names nothing is fetched that vLLM would not fetch itself.
            try:
                config = plain(model, trust_remote_code, revision, *args, **kwargs)
            except Exception:
                if not is_drafter(model, revision, token):
                    raise
            else:
                # Where the package is imported, transformers knows its type.
                if getattr(config, "model_type", None) != "gumiho":
                    return config
        if refusal is not None:
            raise ValueError(f"{str(model)!r} is a Gumiho drafter, which cannot be used here. {refusal}")
        configuration = importlib.import_module("transformers_gumiho.vllm.configuration")
        return configuration.read_drafter(model, revision=revision, token=token)

    get_config.reads_gumiho = True  # type: ignore[attr-defined]
    module.get_config = get_config


def is_drafter(model: Any, revision: str | None = None, token: Any = None) -> bool:
    """Returns whether a name or folder that vLLM is given is that of a Gumiho drafter."""
    fields = _config_fields(model, revision, token)
    if fields.get("model_type") == "gumiho":
        return True
    if "gumiho" not in str(model).lower() or fields.get("model_type") not in (None, "llama"):
        return False
    # The released drafters have no config, or one in the layout of the reference implementation.
    released = importlib.import_module("transformers_gumiho.model.released_configs")
    return released.find_packaged_folder(model) is not None


def _config_fields(model: Any, revision: str | None, token: Any) -> dict[str, Any]:
    """Returns what a model's `config.json` holds; nothing where there is none or it cannot be read."""
    try:
        if os.path.exists(model):
            file = Path(model) / "config.json"
        else:
            hub = importlib.import_module("huggingface_hub")
            file = Path(hub.hf_hub_download(str(model), "config.json", revision=revision, token=token))
        fields = json.loads(file.read_text(encoding="utf-8"))
    except Exception:  # vLLM says what is wrong with its model
        return {}
    return fields if isinstance(fields, dict) else {}


# Which classes draft.


def _choose_by_drafter(name: str, our_module: str, our_name: str, module: Any) -> None:
    """Makes the class `name` of `module` give an object of our class where the drafter is a Gumiho drafter."""
    plain = getattr(module, name)
    if "__new__" in vars(plain):
        return

    def choose(cls: type, vllm_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        # There is no config where an object is copied, and no drafter where it is another kind of speculation.
        drafter = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
        if cls is plain and ARCHITECTURE in (getattr(drafter, "architectures", None) or ()):
            cls = getattr(importlib.import_module(our_module), our_name)
        return object.__new__(cls)

    plain.__new__ = choose


def _after_import(name: str, change: Callable[[Any], None]) -> None:
    """Calls `change` with the module `name`: at once where it is imported already, else when it is."""
    if name in sys.modules:
        change(sys.modules[name])
    elif not any(isinstance(finder, _ChangingFinder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _ChangingFinder(name, change))


class _ChangingFinder(MetaPathFinder):
    """Finds one module as Python does, and changes it once it has been executed."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name, self._change = name, change

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            try:
                self._change(module)
            except Exception as error:
                _say_what_does_not_fit(error)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


__all__ = ["ARCHITECTURE", "TESTED_RELEASES", "is_drafter", "register"]
