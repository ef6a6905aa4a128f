"""Stages, graph split, queues, weights, affinity, simulation, Pareto, migration."""
