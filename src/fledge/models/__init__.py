"""Models: loading Hugging Face causal LMs as they are, adapters, value heads, and the attention
they run with.
"""
