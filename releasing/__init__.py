"""Releases of this repository's distributions: read from the git history, checked, and made.

The noxfile builds its matrix from `distributions` and `history`; `python -m releasing` is what
`nox -s release` and `nox -s lint` run. docs/releases.md is the page for people.
"""
