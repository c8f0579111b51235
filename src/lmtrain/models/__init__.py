"""Presets to transformers models: building them, our attention function, the wrapper that returns the loss."""
