"""Benchmarks: `python -m tests.bench` runs all of them and writes results/bench/NAME.json. No test asserts a time."""
