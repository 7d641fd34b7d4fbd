"""Needs a newer core; must never be imported."""

raise AssertionError("imported")
