"""`python -m sft_toolkit` is the console script `sft-toolkit`."""

from sft_toolkit.cli import program

if __name__ == "__main__":
    program()
