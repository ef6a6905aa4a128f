"""Two towers of a CLIP-style model on two devices, bound into one pipeline."""
