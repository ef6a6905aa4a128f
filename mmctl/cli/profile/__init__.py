"""Commands of ``mmctl profile``, one file each."""
