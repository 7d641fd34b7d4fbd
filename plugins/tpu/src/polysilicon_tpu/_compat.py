"""The only branches on core's version: delete each when the lower bound in pyproject.toml rises."""
