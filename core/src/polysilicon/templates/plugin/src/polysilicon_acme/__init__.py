"""Polysilicon on Acme chips; core finds the module `plugin` by its entry point."""
