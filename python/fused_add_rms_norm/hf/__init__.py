"""Drop-in for Hugging Face models: ``hf.patch(model)`` runs every residual add together with its norm.

stream.py has the idea, modules.py puts it into a model, observers.py says when it must not show.
"""

from .patching import patch, supported, unpatch
from .report import Report, Site, count

__all__ = ["Report", "Site", "count", "patch", "supported", "unpatch"]
