"""Speaks plugin API 2; must never be imported."""

raise AssertionError("imported")
