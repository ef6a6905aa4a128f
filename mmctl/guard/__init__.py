"""An HTTP server in front of serving engines: sees, routes, shrinks, queues or refuses."""
