"""Polysilicon on Google TPUs; core finds the module `plugin` by its entry point."""
