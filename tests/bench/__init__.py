"""Benchmarks: `python -m tests.bench` runs them all and writes results/bench/NAME.json. No test reads a clock."""
