"""Run the notebooks, and write their outputs and the pictures that they save: ``python docs/run_notebooks.py``."""

import shutil
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).with_name("notebooks")


def run(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Return the notebook with its outputs, without those to stderr; it runs in ``folder``.

    Raises:
        CellExecutionError: a cell raises an exception.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, record_timing=False, coalesce_streams=True, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def main() -> None:
    """Run all notebooks and replace them and their pictures."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            notebook = run(path, Path(folder))
            for picture in Path(folder).glob("*.png"):
                shutil.copy(picture, NOTEBOOKS)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
