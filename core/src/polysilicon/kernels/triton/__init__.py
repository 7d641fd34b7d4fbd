"""Kernels in Triton: how each is called; `exported` holds the programs, made from Helion's."""
