"""Building transformers models from presets, lmtrain's attention function, and the wrapper that returns the loss."""
