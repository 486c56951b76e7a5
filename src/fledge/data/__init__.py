"""Tasks, rendering of messages to tokens, and packing. Knows no model and runs none."""
