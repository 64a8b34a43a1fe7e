"""Training of heads and small language models: losses, loop, checkpoints, held-out figures."""
