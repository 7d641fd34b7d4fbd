"""Polysilicon on IBM Spyre; core finds the module `plugin` by its entry point."""
