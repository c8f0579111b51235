"""Parameter groups, optimizers and learning-rate schedules; plain PyTorch, no Lightning or Hydra."""
