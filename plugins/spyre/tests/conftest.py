"""The conformance suite's report: `pytest --polysilicon-report FILE`."""

pytest_plugins = ["polysilicon.testing.plugin"]
