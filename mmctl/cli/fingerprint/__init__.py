"""Commands of ``mmctl fingerprint``, one file each."""
