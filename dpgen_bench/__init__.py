"""One bench for differentially private image generators: a method is one file and one yaml, all else is shared."""

from importlib.metadata import version

__version__ = version("dpgen-bench")
