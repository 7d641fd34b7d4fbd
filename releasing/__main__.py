"""`python -m releasing release NAME X.Y.Z [--dry-run]` and `python -m releasing fragments`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from releasing import checks, fragments
from releasing.distributions import ReleasingError, distributions, find
from releasing.steps import Making


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; 1 means that something speaks against it, 2 that it was called wrongly."""
    parser = argparse.ArgumentParser(prog="releasing", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the repository")
    commands = parser.add_subparsers(dest="command", required=True)
    release = commands.add_parser("release", help="every step up to the upload")
    release.add_argument("name", help="core, or a plugin's folder name")
    release.add_argument("version", help="X.Y.Z")
    release.add_argument("--dry-run", action="store_true", help="check, and print the steps")
    commands.add_parser("fragments", help="is there a changelog fragment for every change?")
    given = parser.parse_args(arguments)
    root = given.root.resolve()
    try:
        if given.command == "fragments":
            return _fragments(root)
        return _release(root, given.name, given.version, dry_run=given.dry_run)
    except ReleasingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _fragments(root: Path) -> int:
    found = [
        problem
        for distribution in distributions(root)
        for problem in fragments.problems(distribution)
    ]
    for problem in found:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if found else 0


def _release(root: Path, name: str, version: str, *, dry_run: bool) -> int:
    plan = checks.plan(find(root, name), version)
    problems = checks.problems(plan)
    making = Making(plan=plan)
    if dry_run:
        steps = [*making.before_the_tag(), *making.from_the_tag()]
        for number, step in enumerate(steps, 1):
            print(f"{number}. {step.text}", flush=True)
    # Last, where they are seen.
    for problem in problems:
        print(f"refused: {problem}", file=sys.stderr)
    if problems:
        return 1
    if not dry_run:
        making.run(lambda text: print(f"— {text}", flush=True))
        print(making.upload_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
