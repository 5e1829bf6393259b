"""Variations of a training script: each a function, registered by its name. What they share is in `bench.py`."""

from . import bodies, layouts, models, optimizers, refusals, roles, samples, sharded
from .bench import ALL, Variation

__all__ = ["ALL", "Variation", "bodies", "layouts", "models", "optimizers", "refusals", "roles", "samples", "sharded"]
