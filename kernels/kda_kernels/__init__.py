"""Contracts, references and kernels of the decode operators. Never imports kda_ops."""

__version__ = "0.1.0"
