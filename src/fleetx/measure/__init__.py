"""Bytes: predicted on tensors without data (trace), measured on real ones (measure), written and read (sizes)."""
