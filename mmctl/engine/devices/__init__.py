"""Device table, topology, link and stage cost models, resource score."""
