"""Recovery: rebuild what tripped, prove that its answers are right again, name what failed."""
