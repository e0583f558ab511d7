"""Small configs of any model type of transformers, for the scripts of this folder."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
from tiny_configs import small_config


__all__ = ["small_config"]
