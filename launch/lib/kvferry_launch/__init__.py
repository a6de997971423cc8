"""The Python code of the scripts in launch/. The tests import this code too.

All sub-packages may import the top-level modules `paths`, `process` and `progress`, which use only the standard
library. The docstring of each sub-package says what the sub-package contains and what it may import;
tests/layering_test.py checks the imports.
"""
