"""The shared library under every command: it never prints and never reads argv."""
