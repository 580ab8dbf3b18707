"""Processes and engines: what was launched, which DeepSpeed settings hold, what really engaged."""
