"""Holdfast keeps distributed PyTorch training running."""

__version__ = "0.1.0"
