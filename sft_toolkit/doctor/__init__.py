"""`doctor`: what of this machine would stop a training, or make it wait, before one is started.

A check is a function that returns findings; `checks.py` lists them. Nothing is changed, and nothing waits for longer
than its own time limit.
"""
