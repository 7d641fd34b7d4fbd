"""What speaks against a release, all of it at once; nothing here changes anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version

from releasing import fragments, history
from releasing.distributions import CORE, Distribution, ReleasingError, find, pre_releases

if TYPE_CHECKING:
    from collections.abc import Iterator

    from releasing.distributions import Project
    from releasing.history import Release

#: A plugin supports the current minor of core and this many before it.
OLDER_MINORS = 2
#: Below this line a release writes its changes, as [tool.towncrier] says.
MARKER = "<!-- towncrier release notes start -->"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A release that is asked for, with what the tree and the history say."""

    distribution: Distribution
    version: Version
    project: Project
    released: tuple[Release, ...]
    core_released: tuple[Release, ...]

    @property
    def last(self) -> Release | None:
        return self.released[-1] if self.released else None

    @property
    def tag(self) -> str:
        return f"{self.distribution.name}-v{self.version}"

    @property
    def opens(self) -> Version:
        """The development version of the commit that follows the release."""
        after = Version(f"{self.version.major}.{self.version.minor + 1}.0")
        return Version(f"{max(after, Version(self.project.version.base_version))}.dev0")


def plan(distribution: Distribution, version: str) -> Plan:
    """Reads what a release has to know.

    Raises:
        ReleasingError: the version has another form than X.Y.Z, or the history is not here.
    """
    parts = version.split(".")
    if len(parts) != 3 or not all(part.isdecimal() and str(int(part)) == part for part in parts):
        raise ReleasingError(f"the version is {version!r}: expected X.Y.Z, such as 0.1.1")
    core = find(distribution.root, CORE)
    return Plan(
        distribution=distribution,
        version=Version(version),
        project=distribution.project(),
        released=tuple(history.releases(distribution)),
        core_released=tuple(history.releases(core)),
    )


def problems(asked: Plan) -> list[str]:
    """Every reason against this release, one sentence each; empty when it may be made."""
    found = [
        *_tree(asked),
        *_version(asked),
        *_dependencies(asked),
        *_changelog(asked),
    ]
    if not asked.distribution.is_core:
        try:
            found += _core_bounds(asked)
        except ReleasingError as error:
            found.append(str(error))
    return found


def _tree(asked: Plan) -> Iterator[str]:
    root = asked.distribution.root
    dirty = history.git(root, "status", "--porcelain").decode().splitlines()
    if dirty:
        more = f" and {len(dirty) - 1} more" if len(dirty) > 1 else ""
        yield f"the tree is not clean ({dirty[0].strip()}{more}): commit or stash first"
    if not history.git(root, "branch", "--show-current").strip():
        yield "no branch is checked out: check out the branch that the release goes on"
    if asked.tag in history.git(root, "tag", "--list", asked.tag).decode().split():
        yield f"the tag {asked.tag} is there already"


def _version(asked: Plan) -> Iterator[str]:
    tree, wanted = asked.project.version, asked.version
    if not tree.is_devrelease:
        yield (
            f"the tree's version is {tree}, not a .dev0 one: the commit that follows the last "
            "release is missing, open the next version first"
        )
    if asked.last is None:
        if wanted != Version(tree.base_version):
            yield f"there was no release yet, so the first is the tree's {tree.base_version}"
        return
    last = asked.last.version
    major, minor, patch = last.release
    allowed = {
        Version(f"{major}.{minor}.{patch + 1}"): "patch",
        Version(f"{major}.{minor + 1}.0"): "minor",
        Version(f"{major + 1}.0.0"): "major",
    }
    if wanted not in allowed:
        follow = ", ".join(f"{version} ({kind})" for version, kind in allowed.items())
        yield f"{wanted} does not follow {last}: next are {follow}"
    elif allowed[wanted] == "patch":
        kinds = sorted({f.type for f in fragments.fragments(asked.distribution)})
        breaking = [kind for kind in kinds if kind in ("changed", "removed")]
        if breaking:
            yield (
                f"{wanted} is a patch, and changes/ has fragments of type {', '.join(breaking)}: "
                f"a patch never breaks anyone, release {major}.{minor + 1}.0"
            )


def _dependencies(asked: Plan) -> Iterator[str]:
    for requirement in pre_releases(asked.project):
        yield f"it requires '{requirement}', a pre-release: require a released version"


def _changelog(asked: Plan) -> Iterator[str]:
    distribution = asked.distribution
    yield from fragments.problems(distribution)
    if not fragments.fragments(distribution):
        yield f"{distribution.folder}/changes has no fragment: what would users gain?"
    changelog = distribution.path / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8") if changelog.is_file() else ""
    if MARKER not in text.splitlines():
        yield f"{distribution.folder}/CHANGELOG.md has no line '{MARKER}' below its heading"
    if f"\n## {asked.version} " in text:
        yield f"{distribution.folder}/CHANGELOG.md has an entry for {asked.version} already"


def _core_bounds(asked: Plan) -> Iterator[str]:
    """A plugin's range of cores: its floor was released, and the support window lies inside."""
    specifier, floor = asked.project.core_specifier, asked.project.core_floor
    versions = [release.version for release in asked.core_released]
    if not versions:
        yield "core was never released: release core first"
        return
    newest = versions[-1]
    window = {
        version.release[:2]
        for version in versions
        if version.major == newest.major and version.minor >= newest.minor - OLDER_MINORS
    }
    accepted = {version.release[:2] for version in versions if version in specifier}
    left_out = [f"{major}.{minor}" for major, minor in sorted(window - accepted)]
    if left_out and not floor.is_prerelease:
        yield (
            f"'{specifier}' leaves out core {', '.join(left_out)}: a release supports the "
            f"current minor of core, {newest.major}.{newest.minor}, and the {OLDER_MINORS} before"
        )
    yield from _raised_floor(asked, floor)


def _raised_floor(asked: Plan, floor: Version) -> Iterator[str]:
    if asked.last is None or floor <= asked.last.project.core_floor:
        return
    told = any(
        f.type == "changed" and str(floor) in f.text
        for f in fragments.fragments(asked.distribution)
    )
    if not told:
        yield (
            f"the floor on core rose from {asked.last.project.core_floor} to {floor}, and no "
            f"'changed' fragment says so: add one that names {floor}"
        )
