"""Kimi Delta Attention decode for PyTorch: operators, graph pass, command line."""

__version__ = "0.1.0"
