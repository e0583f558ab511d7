"""The page of `gumiho demo` as a Space.

The drafter is the folder `gumiho` beside this file, or else that of the pair. Variables of the Space choose what it
shows: `PAIR` (smollm2 by default), or `TARGET` and `ASSISTANT`, folders or names on the Hub.
"""

import os
from pathlib import Path

from transformers_gumiho.tools.presenting import DemoArguments, make_page


beside = Path(__file__).parent / "gumiho"
target, assistant = os.environ.get("TARGET"), os.environ.get("ASSISTANT")
pair = os.environ.get("PAIR", None if target and assistant else "smollm2")
if assistant is None and beside.is_dir():
    assistant = str(beside)

demo = make_page(DemoArguments(pair=pair, target=target, assistant=assistant))

if __name__ == "__main__":
    demo.launch()
