"""AMD's GPUs for Polysilicon; core finds the module `plugin` by its entry point."""
