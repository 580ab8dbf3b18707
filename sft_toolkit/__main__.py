"""`python -m sft_toolkit` is the console script `sft-toolkit`."""

import sys

from sft_toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
