"""The command line: parses, calls what everyone else calls, and prints around it."""
