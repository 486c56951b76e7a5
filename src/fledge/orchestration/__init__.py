"""The Controller: places the parts, runs the one loop and keeps the books."""
