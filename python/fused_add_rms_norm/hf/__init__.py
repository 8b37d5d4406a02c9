"""Drop-in for Hugging Face models: ``hf.patch(model)``, and both residual adds of every layer run fused with their norms.

stream.py has the idea, modules.py puts it into a model, observers.py says when it must not show.
"""

from .patching import patch, supported, unpatch
from .report import Count, Report, Site, count

__all__ = ["Count", "Report", "Site", "count", "patch", "supported", "unpatch"]
