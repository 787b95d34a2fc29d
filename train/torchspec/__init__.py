"""`train.engine: torchspec`: TorchSpec prefills and trains at once; draftsmith drives it (docs/torchspec.md)."""

from draftsmith.train.torchspec.stage import train

__all__ = ["train"]
