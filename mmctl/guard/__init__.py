"""An HTTP server in front of serving engines, made of route, breaker and verify."""
