"""Portable kernels in forms other than plain PyTorch, one folder a toolchain."""
