"""Benchmarks: ``python -m bench.bench_<name>`` measures, ``python -m bench.tables`` puts the results into the docs."""
