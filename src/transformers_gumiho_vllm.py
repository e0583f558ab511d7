"""
The entry point of the plug-in for vLLM.

Every process of vLLM calls [`register`], with a drafter or without one. Importing the package takes time and changes
`generate()`. So this module is outside of the package, and only registers what to import for a Gumiho drafter.
"""

import functools
import importlib
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any


ARCHITECTURE = "EagleGumihoModel"
_MODEL = "transformers_gumiho.vllm.model:GumihoForCausalLM"
# For each of vLLM's two model runners: the module and name of the class that drafts, and of our class for it.
_DRAFTING_CLASSES = {
    "vllm.v1.spec_decode.eagle": ("EagleProposer", "transformers_gumiho.vllm.proposer", "GumihoProposer"),
    "vllm.v1.worker.gpu.spec_decode.eagle.speculator": (
        "EagleSpeculator", "transformers_gumiho.vllm.speculator", "GumihoSpeculator",
    ),
}  # fmt: skip

# Below vLLM's own logger, so the user's handlers and level apply.
logger = logging.getLogger("vllm.transformers_gumiho")


def register() -> None:
    """
    Makes vLLM draft with Gumiho drafters. Further calls change nothing.

    If vLLM has Gumiho itself, this does nothing. What the plug-in needs of vLLM is checked where a Gumiho drafter is
    loaded. All other models work as without this package.
    """
    try:
        registry = importlib.import_module("vllm.model_executor.models.registry").ModelRegistry
        if any("Gumiho" in name and name != ARCHITECTURE for name in registry.models):
            _say_once("This vLLM has Gumiho itself, so the Gumiho plug-in does nothing.")
            return
        if ARCHITECTURE not in registry.models:
            registry.register_model(ARCHITECTURE, _MODEL)
        for module, names in _DRAFTING_CLASSES.items():
            _after_import(module, functools.partial(_choose_by_drafter, *names))
        _after_import("vllm.v1.core.sched.scheduler", _watch_acceptance)
        _read_configs_of_drafters()
    except Exception as error:
        _say_what_does_not_fit(error)


def _say_once(message: str) -> None:
    """Writes to the log, only in the main process."""
    if multiprocessing.parent_process() is None:
        logger.warning(message)


def _say_what_does_not_fit(error: Exception) -> None:
    """Logs an error instead of raising it, because vLLM must work without Gumiho."""
    _say_once(f"The Gumiho plug-in does not fit this vLLM and is disabled ({type(error).__name__}: {error}).")


# Reading the configs of drafters.


def _read_configs_of_drafters() -> None:
    """Makes vLLM read configs of Gumiho drafters with this package, and logs once if its release is untested."""
    warn = functools.cache(_say_once)
    # Patched where it is called, because vLLM imports the function by its name.
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
            # For all other names, only files are fetched that vLLM fetches itself.
            try:
                config = plain(model, trust_remote_code, revision, *args, **kwargs)
            except Exception:
                if not is_drafter(model, revision, token):
                    raise
            else:
                # If the package is imported, transformers knows the type `gumiho`.
                if getattr(config, "model_type", None) != "gumiho":
                    return config
        configuration = importlib.import_module("transformers_gumiho.vllm.configuration")
        version = str(importlib.import_module("vllm").__version__)
        if caution := importlib.import_module("transformers_gumiho.vllm.contract").caution(version):
            warn(caution)
        return configuration.read_drafter(model, revision=revision, token=token)

    get_config.reads_gumiho = True  # type: ignore[attr-defined]
    module.get_config = get_config


def is_drafter(model: Any, revision: str | None = None, token: Any = None) -> bool:
    """Whether a name or folder is that of a Gumiho drafter."""
    fields = _config_fields(model, revision, token)
    if fields.get("model_type") == "gumiho":
        return True
    if "gumiho" not in str(model).lower() or fields.get("model_type") not in (None, "llama"):
        return False
    # The released drafters have no config, or one in the layout of the reference implementation.
    released = importlib.import_module("transformers_gumiho.model.loading")
    return released.find_packaged_folder(model) is not None


def _config_fields(model: Any, revision: str | None, token: Any) -> dict[str, Any]:
    """Returns the fields of a model's `config.json`; none if the file is missing or cannot be read."""
    try:
        if os.path.exists(model):
            file = Path(model) / "config.json"
        else:
            hub = importlib.import_module("huggingface_hub")
            file = Path(hub.hf_hub_download(str(model), "config.json", revision=revision, token=token))
        fields = json.loads(file.read_text(encoding="utf-8"))
    except Exception:  # vLLM itself reports what is wrong with the model
        return {}
    return fields if isinstance(fields, dict) else {}


# Choosing the class that drafts.


def _choose_by_drafter(name: str, our_module: str, our_name: str, module: Any) -> None:
    """Makes the class `name` of `module` create an object of our class if the drafter is a Gumiho drafter."""
    plain = getattr(module, name)
    if "__new__" in vars(plain):
        return

    def choose(cls: type, vllm_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cls is plain and _drafts_with_gumiho(vllm_config):
            cls = getattr(importlib.import_module(our_module), our_name)
        return object.__new__(cls)

    plain.__new__ = choose


def _drafts_with_gumiho(vllm_config: Any) -> bool:
    # A copied object has no config, and other kinds of speculation have no drafter.
    drafter = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    return ARCHITECTURE in (getattr(drafter, "architectures", None) or ())


def _after_import(name: str, change: Callable[[Any], None]) -> None:
    """Calls `change` with the module `name`: now if it is imported, or else after its import."""
    if name in sys.modules:
        change(sys.modules[name])
    elif not any(isinstance(finder, _ChangingFinder) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _ChangingFinder(name, change))


class _ChangingFinder(MetaPathFinder):
    """Finds one module as Python does, and changes it after it is executed."""

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


# Judging a drafter by the drafts that the target accepts.


def _watch_acceptance(module: Any) -> None:
    """Makes vLLM's scheduler, which counts accepted drafts on the host, pass its counts on."""
    plain = module.Scheduler.make_spec_decoding_stats
    if hasattr(plain, "watches_gumiho"):
        return

    @functools.wraps(plain)
    def make_spec_decoding_stats(
        self: Any, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        if not hasattr(self, "gumiho_acceptance"):
            self.gumiho_acceptance = _Acceptance() if _drafts_with_gumiho(self.vllm_config) else None
        if self.gumiho_acceptance is not None:
            self.gumiho_acceptance.observe(num_accepted_tokens)
        return plain(self, stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    make_spec_decoding_stats.watches_gumiho = True  # type: ignore[attr-defined]
    module.Scheduler.make_spec_decoding_stats = make_spec_decoding_stats


class _Acceptance:
    """Warns once if the target accepts nearly none of `JUDGED` drafts, one after another, of any requests."""

    JUDGED = 300
    FEW = 0.05  # accepted tokens per draft

    def __init__(self) -> None:
        self._num_drafts = self._num_accepted = 0
        self._has_warned = False

    def observe(self, num_accepted: int) -> None:
        """Counts a draft, of which the target accepted `num_accepted` tokens."""
        self._num_drafts += 1
        self._num_accepted += num_accepted
        if self._num_drafts < self.JUDGED:
            return
        if self._num_accepted < self.FEW * self.JUDGED and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The target accepted %d tokens of %d drafts, so drafting costs time and gains none. The usual causes: "
                "the drafter was trained for another target; it reads other layers than the target passes on "
                "(`target_layer_ids`); the requests are longer than the drafter's `max_position_embeddings`. Serve "
                "without `--speculative-config`, or with a drafter that fits.",
                self._num_accepted, self._num_drafts,
            )  # fmt: skip
        # What the drafter did long ago does not hide what it does now.
        self._num_drafts = self._num_accepted = 0
