"""The version of the package; the build reads this file, too."""

__version__ = "0.1.0"
