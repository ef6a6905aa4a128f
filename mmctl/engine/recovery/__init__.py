"""Rebuild steps, canaries, verification, failure chains."""
