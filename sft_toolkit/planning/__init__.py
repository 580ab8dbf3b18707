"""How much memory a run takes, before it runs: arithmetic over the model's configuration and the strategy.

`shape.py` reads the model (its configuration alone, on the meta device), `memory.py` is the arithmetic, `plan.py`
compares strategies and writes the recommendation. docs/decisions/memory.md holds it against measured runs.
"""
