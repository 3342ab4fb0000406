"""One declaration per operator and everything that is derived from it.

Lives here: the vocabulary (spec), the validator (check), signatures for caching (signature), the
torch schema (schema) and the documentation tables (render). Not here: the declarations, which
stand in ``<operator>/contract.py``, and anything that knows a kernel.
"""
