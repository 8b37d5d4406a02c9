"""Sphinx: the API reference, from the docstrings. `make docs` builds it with warnings as errors."""

import importlib.metadata

project = "fused_add_rms_norm"
release = importlib.metadata.version("fused-add-rms-norm")
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
html_theme = "alabaster"
