"""A folder with all that an installation on a machine without network needs."""
