"""Packed rows: each document sees itself only, without a dense mask."""
