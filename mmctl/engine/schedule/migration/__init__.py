"""Live migration: a running decode moves to another engine, device or process, and goes on.

The graph of one step is frozen (``graph``), rebuilt by an engine (``engines``), and its state
(``state``) is handed over between two processes (``worker``, by ``handover``), watched by a third
(``live``).
"""
