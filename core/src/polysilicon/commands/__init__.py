"""The commands: each module here exports `register(app)` and is found by being here."""
