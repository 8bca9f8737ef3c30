"""Configuration of the documentation site, which ``make docs`` builds into build/docs."""

import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from loco_ext import __version__

sys.path.append(str(Path(__file__).parent))  # for command_help

project = "loco_ext"
copyright = "the loco_ext authors, MIT license"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "command_help"]
html_theme = "furo"
html_title = f"loco_ext {__version__}"

# GitHub renders the pages too: headings have GitHub's anchors, and formulas stand between dollars.
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
nb_execution_mode = "off"  # notebooks keep their committed outputs; the tests run them

autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "inherited-members": "Module, Optimizer, tuple, Exception",  # members of our own base classes only
    "exclude-members": "__init__, __new__, extra_repr, register_parameter",
}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_custom_sections = ["Source"]
napoleon_use_ivar = True
# The build reads no other project's index, so its names, and those of types that nobody constructs, are plain text.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|nn|numpy|collections|typing|pathlib|types)\..*|Tensor|Locality"),
    ("py:class", r"loco_ext\..*\.(LocalityOptimizer|StepsInBackward|CountedNetwork)"),
]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", skip_fields)


def skip_fields(app: Sphinx, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples, which are described with their class; None keeps what is usual."""
    return True if type(member).__name__ == "_tuplegetter" else None
