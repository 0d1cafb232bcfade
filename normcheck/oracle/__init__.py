"""The oracle: correct values, and how far a correct kernel may be off. Imports cases and errors, no GPU library."""
