"""Has the plugin name of another distribution; must never be imported."""

raise AssertionError("imported")
