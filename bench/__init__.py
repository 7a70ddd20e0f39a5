"""Benchmarks: one module a suite, run by `make bench SUITE=NAME`; figures in `bench/out/`."""
