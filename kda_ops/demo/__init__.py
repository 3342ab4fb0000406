"""The demonstration: a small model decodes eagerly, compiled, and compiled with the pass.

model.py is ordinary model code, decode.py runs it and compares, rewrite.py finds out what the pass
did, kimi_linear.py does the same for transformers' own model, report.py and progress.py print,
command.py is `kda-ops demo`. Nothing here is imported by the rest of the package.
"""
