"""Commands of ``mmctl benchmark``, one file each."""
