"""Fingerprints, contention, the streams model, PTX, kernel timelines."""
