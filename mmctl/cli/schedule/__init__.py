"""``mmctl schedule``: place, route and simulate."""
