"""The command line: parses, calls the functions that everyone else calls, and prints around them."""
