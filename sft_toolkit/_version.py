"""The version, alone in a module that imports nothing: packaging and `--version` read it."""

__version__ = "0.1.0"
