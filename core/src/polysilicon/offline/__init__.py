"""Compiling kernels for chips that are not on this machine (docs/compile.md)."""
