"""The training loop and its parts: step, optimizer, checkpoints, metrics, signals."""
