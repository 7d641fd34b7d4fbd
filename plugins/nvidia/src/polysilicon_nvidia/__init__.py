"""NVIDIA's GPUs for Polysilicon: detection, layouts and kernels. `plugin.py` answers the hooks."""
