"""The kernels, one op per file; each module is imported when one of its kernels is bound."""
