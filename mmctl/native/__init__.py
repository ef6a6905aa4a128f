"""C sources, compiled by ``cc`` on first use into the cache folder."""
