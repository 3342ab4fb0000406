"""Other libraries' models, made readable for the graph pass.

Each module is for one library and imports nothing of it before it is used. Not here: the pass.
"""
