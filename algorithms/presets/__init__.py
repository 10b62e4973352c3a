"""The online algorithms, a module each: where it comes from, what it changes, and its settings.

A new one is a new module with a `PRESET`; its parts, where they are new too, are functions among the others
or a file of your own (docs/algorithms.md).
"""
