"""Scripts of the repository that are no modules of a package."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


ROOT = Path(__file__).parents[2]


def load_script(path: str) -> ModuleType:
    """Returns a script, given by its path in the repository, as a module."""
    spec = spec_from_file_location(Path(path).stem, ROOT / path)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
