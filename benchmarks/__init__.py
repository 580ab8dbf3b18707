"""Measurements, not tests: nothing here asserts a speed. See README.md."""
