"""Pickles, archives and sizes from strangers: refusal, caps, a child with limited memory."""
