"""Commands of ``mmctl breaker``, one file each."""
