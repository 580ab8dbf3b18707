"""The training script: `accelerate launch train.py --config run.yaml [section.key=value ...]`.

Everything is in the configuration; `sft_toolkit/assemble.py` is the table of contents of a run.
"""

import sys

from sft_toolkit.cli import program

if __name__ == "__main__":
    program(["train", *sys.argv[1:]])
