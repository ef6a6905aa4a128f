"""Tensor operations that give memory back (torch)."""
