"""The layers: modules made of ops, each bound once to the kernels of a device."""
