"""The verbs: what the members of a group do together."""
