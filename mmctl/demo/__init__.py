"""A small vision-language server built on the agent, its own process: ``python -m mmctl.demo``."""
