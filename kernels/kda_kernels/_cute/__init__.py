"""The CUDA backend: CuTe DSL kernels, compiled on first use for the device's architecture.

Lives here: targets (target.py), compiling, linking, caching and loading (compile.py), device
functions that kernels share (device.py). Not here: the operators' own kernels (<op>/cute.py), what
a call is compiled to (<op>/launch.py) and the choice of a backend (plan.py).
"""
