"""Programs exported from `kernels.helion`, which need no Helion; never edited by hand."""
