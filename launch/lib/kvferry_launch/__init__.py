"""The Python behind launch/'s scripts, shared with the tests.

The top level holds what all sub-packages may import: `paths`, `process`, `progress`, standard library only. Each
sub-package's docstring says what belongs there and what it may import; tests/layering_test.py checks it.
"""
