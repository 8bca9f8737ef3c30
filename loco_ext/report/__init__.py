"""One HTML page from the folders of any runs: their tables, figures, and the numbers behind each figure."""
