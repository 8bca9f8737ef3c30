"""Benchmarks, and their tables in the docs.

python -m bench.bench_NAME            measures everything, writes bench/results/, prints tables
python -m bench.bench_NAME --quick    gives a first impression; writes nothing without --out
python -m bench.tables                puts the results into the docs
"""
