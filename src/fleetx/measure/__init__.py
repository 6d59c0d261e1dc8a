"""Memory and time of a training step, predicted on tensors without data or measured on real ones."""
