"""Responses: tensor operations that give memory back, on tensors of any torch device.

Each response is a pair of plain functions, one that shrinks or moves a tensor and one that
undoes it as far as the method allows. They run when memory is short: at no moment do they
hold more than their output and one chunk (``CHUNK_BYTES``) above what was there before.
"""
