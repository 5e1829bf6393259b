"""Imported by train.py, relatively."""

FACTOR = 3


class Model:
    def __init__(self, rank):
        self.rank = rank

    def forward(self, x):
        return FACTOR * x + self.rank
