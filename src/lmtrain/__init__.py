"""Train language models with PyTorch Lightning, composed by Hydra."""

__version__ = "0.1.0"
