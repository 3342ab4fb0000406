"""What tests and benchmarks need of every operator: inputs drawn from contracts, comparisons.

Lives here: cases (inputs), violations (one illegal call per rule), compare (error budgets,
bitwise-untouched pools). Not here: tests.
"""
