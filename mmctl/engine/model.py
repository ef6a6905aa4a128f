"""The small vision-language model of demo, benchmarks and canaries (torch)."""
