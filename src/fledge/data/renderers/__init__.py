"""How each family of chat models writes a conversation, and how its replies are read. Use these
through `fledge.data.render`.
"""
