"""Studies on CIFAR-10 whose results are in docs/studies.md: ``python -m studies.NAME --data DIR`` runs one again."""
