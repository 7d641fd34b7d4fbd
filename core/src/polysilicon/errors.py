"""The errors Polysilicon raises for plugin and device trouble.

Mistakes in a caller's arguments are plain `ValueError` and `TypeError`. Every message says what
came, what was expected and what to do.
"""

from __future__ import annotations


class PolysiliconError(Exception):
    """Base of all errors of this package."""


class RecordError(PolysiliconError, ValueError):
    """A record that a hook returned does not hold together."""


class PluginError(PolysiliconError):
    """A plugin asked for by name cannot be used: incompatible, broken or disabled."""


class DeviceError(PolysiliconError):
    """A device is unknown, absent, or only forced (explain and compile work, running does not)."""


class SelectionError(PolysiliconError):
    """No kernel fits a problem, or two tie; the text lists every candidate and its reason."""


class KernelError(PolysiliconError):
    """A kernel raised while it ran; names the kernel and the switch that turns it off."""


class LayoutError(PolysiliconError, TypeError):
    """A tensor in one layout was handed to something that takes another."""


class ToolchainError(PolysiliconError):
    """A compiler or interpreter that a kernel needs is missing, or of an unsupported version."""


class LoadError(PolysiliconError):
    """A model's files are missing, damaged, or of a kind that is refused unless asked for."""


class AdaptError(PolysiliconError):
    """A model, or something attached to it, cannot be adapted or run by the engine."""


class RequestError(PolysiliconError, ValueError):
    """One request is wrong; the other requests of the engine are not affected."""


class PolysiliconWarning(UserWarning):
    """Something was not used, or fell back; says what, why and what to do. Once per process."""


#: Modules that an optional extra of this distribution brings.
_EXTRAS = {
    **dict.fromkeys(("transformers", "gguf", "safetensors", "jinja2", "psutil"), "models"),
    "pytest": "testing",
    "helion": "helion",
}


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What to install for a module that one of our extras brings; None for any other module."""
    module = (error.name or "").partition(".")[0]
    if module not in _EXTRAS:
        return None
    return f"{module} is not installed: pip install 'polysilicon[{_EXTRAS[module]}]'"
