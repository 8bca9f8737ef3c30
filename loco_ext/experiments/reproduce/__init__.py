"""The five papers' experiments as lists of jobs, and their tables beside the papers' values.

    published.json       the papers' values with their sources, read by published.py
    jobs.py              a job is one command of ``loco-ext`` and the folder that it writes to
    pages.py             a page has a paper's tables and figures
    loco_reg.py, ...     a module for each paper, with the functions ``jobs`` and ``page``

Each module says in its ``SCALES`` what the presets smoke, cpu and paper have.
"""
