"""Other libraries' models, made readable for the graph pass or put onto the operators.

Each module is for one library and imports nothing of it before it is used; what they share is
exchange.py. Not here: the pass.
"""
