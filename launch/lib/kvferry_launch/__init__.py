"""The Python code of the scripts in launch/. The tests import this code too.

The top-level modules `paths`, `process` and `progress` use only the standard library and each other. The docstring of
each sub-package says what the sub-package contains and what it may import; tests/layering_test.py checks the imports.
"""
