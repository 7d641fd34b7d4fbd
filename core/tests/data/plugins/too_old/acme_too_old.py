"""Was made for an older core; must never be imported."""

raise AssertionError("imported")
