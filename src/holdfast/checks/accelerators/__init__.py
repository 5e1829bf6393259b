"""Kinds of processors, one file each; docs/processors.md shows how to add one. `registry` finds them by name."""
