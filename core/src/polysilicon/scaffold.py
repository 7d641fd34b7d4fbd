"""Writes a vendor's package from the template: the whole, working plugin of a vendor `acme`."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path

from packaging.version import Version

from polysilicon.discovery import CORE, core_version, installed
from polysilicon.errors import PluginError

TEMPLATE = Path(__file__).parent / "templates" / "plugin"
#: The vendor for whom the template is written, and the requirement that it states.
_VENDOR = "acme"
_REQUIREMENT = "polysilicon>=0,<1"
#: What a plugin, its devices, modules and classes can all be called; longer names overrun lines.
_NAME = re.compile(r"^[a-z][a-z0-9]{1,11}$")


def write_plugin(name: str, folder: Path) -> Path:
    """Writes `polysilicon-<name>` into a folder and returns its path.

    Raises:
        ValueError: no plugin can or should have that name, or the folder is missing or taken.
        PluginError: a plugin of that name is installed, or core itself is not.
    """
    _check_name(name)
    if not folder.is_dir():
        raise ValueError(f"--dir {folder} is not a folder: make it first, or name another")
    package = folder / f"polysilicon-{name}"
    if package.exists():
        raise ValueError(f"{package} is there already: move it away, or choose another --dir")
    requirement = accepted_range()
    for file in template_files():
        target = package / _named(file.as_posix(), name)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = _named((TEMPLATE / file).read_text(encoding="utf-8"), name)
        target.write_text(text.replace(_REQUIREMENT, requirement), encoding="utf-8")
    return package


def template_files() -> list[Path]:
    """The template's files, relative to it, without what installers and tools leave beside them."""
    return [
        file.relative_to(TEMPLATE)
        for file in sorted(TEMPLATE.rglob("*"))
        if file.suffix in (".py", ".md", ".toml")
        or file.name == "py.typed"
        or file == TEMPLATE / ".gitignore"
    ]


def _check_name(name: str) -> None:
    if not _NAME.match(name):
        raise ValueError(
            f"plugin name {name!r}: expected 2 to 12 lower-case letters and digits, a letter "
            "first, e.g. acme"
        )
    if keyword.iskeyword(name) or keyword.iskeyword(name.capitalize()):
        raise ValueError(f"plugin name {name!r} is a word of Python's own: choose another")
    taken = {CORE: "polysilicon itself", "cpu": "core's own device"}
    taken |= {
        plugin.status.name: f"{plugin.status.distribution} {plugin.status.version}, installed here"
        for plugin in installed()
    }
    if name in taken:
        raise PluginError(f"the name {name!r} belongs to {taken[name]}: choose another")
    module = importlib.util.find_spec(name)
    if module is not None and module.origin is not None:  # a mere folder of that name is no module
        raise ValueError(
            f"plugin name {name!r} is the name of a Python module ({module.origin}): devices and "
            "modules called so would be taken for it; choose another"
        )


def accepted_range() -> str:
    """The requirement of a plugin that is begun on this core: it, and the minor after it."""
    core = core_version()
    if not core:
        raise PluginError(
            "polysilicon runs from a source tree that is not installed: a plugin is found by its "
            "metadata, and needs core's; pip install -e core"
        )
    release = Version(core)
    return f"polysilicon>={core},<{release.major}.{release.minor + 2}"


def _named(text: str, name: str) -> str:
    return text.replace(_VENDOR, name).replace(_VENDOR.capitalize(), name.capitalize())
