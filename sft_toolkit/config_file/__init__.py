"""How a configuration file is read; `sft_toolkit.config` is the way in.

In reading order: `tree` (text to nodes with line numbers), `overrides` (section.key=value into the tree), `schema`
(which keys a section takes, and their types), `values` (a node to a typed value), `sections` (a tree to the
dataclasses), `names` (what an unknown key was meant to be), `checks` (files and contradictions), `written` (back to
text). `findings` collects every problem on the way.
"""
