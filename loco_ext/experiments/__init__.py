"""Training runs on real data, from the data to the figure. Their libraries are those of the extra ``demo``."""

from importlib.util import find_spec

_PACKAGES = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "tqdm": "tqdm", "rich": "rich"}
_missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
if _missing:
    raise ModuleNotFoundError(
        f"loco_ext.experiments needs {', '.join(_missing)}: install them with `pip install loco_ext[demo]`"
    )
