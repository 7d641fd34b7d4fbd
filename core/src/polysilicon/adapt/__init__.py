"""Hugging Face models through our layers: recognise, prove, replace, report."""

from polysilicon.adapt.adaptation import Adapted, adapt
from polysilicon.adapt.report import Report, Row

__all__ = ["Adapted", "Report", "Row", "adapt"]
