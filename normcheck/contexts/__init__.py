"""Contexts: the surroundings in which a kernel that is right in eager mode is called again."""
