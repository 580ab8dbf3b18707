"""Folders that hold a model: written whole or not at all, checked, chosen, rotated."""
