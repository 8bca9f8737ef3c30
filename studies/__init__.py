"""Studies on CIFAR-10 whose results are in README.md: ``python -m studies.NAME --data DIR`` runs one again."""
