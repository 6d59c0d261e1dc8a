"""Memory and time of a training step, predicted on fake tensors or measured on real ones."""
