"""The embedded engine: small, one process, for one machine; beyond that the engine is vLLM."""

from polysilicon.engine.engine import Engine
from polysilicon.engine.report import Report
from polysilicon.engine.request import Output, SamplingParams, Update

__all__ = ["Engine", "Output", "Report", "SamplingParams", "Update"]
