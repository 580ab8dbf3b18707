"""The steps of a run from a configuration; `assemble.py` calls them in order."""
