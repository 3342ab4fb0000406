"""The CPU backend: C++ kernels, compiled on first use by the machine's own compiler.

Lives here: building and loading (build.py) and the C++ shared by the operators (the headers).
Not here: the operators' own sources (<op>/cpu.cc) and the choice of a backend (plan.py).
"""
