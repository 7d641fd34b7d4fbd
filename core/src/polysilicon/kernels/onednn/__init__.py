"""Kernels that call oneDNN through PyTorch: x86 CPUs, float32."""
