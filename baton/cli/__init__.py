"""The command line: one thin file per command; the only package that knows the services."""
