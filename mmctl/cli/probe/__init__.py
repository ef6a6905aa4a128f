"""Commands of ``mmctl probe``, one file each."""
