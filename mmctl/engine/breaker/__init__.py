"""State machine, actuators, audit log, loop, evaluation."""
