"""Kernels in Helion's language, the source of what `kernels.triton.exported` holds.

Importing a module of this folder imports Helion, the extra `polysilicon[helion]`, which takes
seconds. Configurations are given: nothing here tunes itself.
"""
